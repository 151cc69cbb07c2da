"""Seconds to pack a random Llama of 8 billion parameters on a GPU: zigzag-q4_k, or a slid folder.

For a slid folder its matrices are pruned by magnitude, keep 6 of 8, when the checkpoint is made. The artifact is
checked first: its hashes, and matrices of the first and the last block against the encoders on the CPU. The files lie
in the page cache when the times are taken; `--work /dev/shm` leaves the disk out of the writing too.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import torch

from benchmarks.shared.checkpoints import DEFAULT_WORK, make_shards, pruned
from benchmarks.shared.shapes import LLAMA_8B, TINY
from benchmarks.shared.timing import check_close, json_option, relative_error, write_figures
from sparsepack.files.atomic import remove
from sparsepack.files.hashing import Hashing
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.linear_folder import SCALE
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.orders import slide as slid_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.slide import Slide
from sparsepack.formats.slide import POSITIONS, Sparse24Artifact, value_type
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import EMBEDDING, HEAD, SITES
from sparsepack.models.pattern import Pattern
from sparsepack.packing import PackRequest, pack

ROOT = Path(__file__).parents[1]
Q6_K_ROWS = 4096
"""Of the embedding and the output, checked against the CPU."""
PATTERN = Pattern(6, 8)
ZIGZAG = "zigzag-q4_k"
FORMATS_TIMED = (ZIGZAG, "slide-int8", "slide-fp8", "slide-bf16")


def check_sparse24(checkpoint: Checkpoint, artifact: Path) -> None:
    """Exit unless the folder is intact and holds what the encoder on the CPU makes."""
    packed = open_artifact(artifact)
    assert isinstance(packed, Sparse24Artifact)
    packed.check_bytes()
    for name, how in packed.slides.items():
        if any(name.startswith(f"model.layers.{layer}.") for layer in (0, checkpoint.layers - 1)):
            weight = f"{name}.weight"
            dtype = value_type(packed.format).dtype
            expected = slid_matrix.encode(checkpoint.tensor(weight), how, dtype)
            for part, value in zip(("", POSITIONS, SCALE), expected, strict=True):
                if value is None:
                    continue
                found = torch.from_numpy(packed.folder.bytes(weight + part).copy())
                if not torch.equal(found, value.view(-1).view(torch.uint8)):
                    raise click.ClickException(f"{weight}{part} is not what the CPU makes")
    click.echo(f"{artifact}: intact; blocks 0 and {checkpoint.layers - 1} bit for bit the CPU's", err=True)


def check_zigzag(checkpoint: Checkpoint, artifact: Path) -> None:
    """Exit unless the file is intact and holds what the encoders on the CPU make."""
    packed = read_packed(artifact)
    for layer in {0, checkpoint.layers - 1}:
        for site in SITES:
            matrix, weight = packed.layers[layer].sites[site].matrix, checkpoint.stacked(layer, site)[0].float()
            expected = zigzag.pack(weight if matrix.row_scale is None else weight / matrix.row_scale[:, None])
            if not torch.equal(matrix.blocks, expected):
                raise click.ClickException(f"blk.{layer}.{site} is not what the CPU packs")
    for name, matrix in ((EMBEDDING, packed.embedding), (HEAD, packed.output)):
        weights = checkpoint.tensor(name)[:Q6_K_ROWS]
        found = matrix.blocks[:Q6_K_ROWS]
        errors = [
            _error(blocks, weights, matrix.format.block)
            for blocks in (found, BLOCKS[matrix.format.block].encode(weights))
        ]
        check_close(f"{name}, beside the CPU's", errors[0], errors[1] * 1.001)
    click.echo(f"{artifact}: intact; blocks 0 and {checkpoint.layers - 1} bit for bit the CPU's", err=True)


def _error(blocks: torch.Tensor, weights: torch.Tensor, kind: str) -> float:
    return relative_error(BLOCKS[kind].decode(blocks), weights.float())


def encoder_rate(format: str, hidden: int, intermediate: int, device: str) -> float:
    """Return bytes of bfloat16 a second of the encoder alone, for the widest matrix, which lies on the device."""
    weight = torch.randn(intermediate, hidden, device=device).to(torch.bfloat16)
    if format != ZIGZAG:
        weight = pruned("up_proj.weight", weight, PATTERN)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        if format == ZIGZAG:
            zigzag.pack(weight)
        else:
            slid_matrix.encode(weight, Slide(PATTERN), value_type(FORMATS[format]).dtype)
        if weight.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return weight.nbytes / statistics.median(seconds[2:])


def process_seconds(request: PackRequest) -> float:
    """Return the seconds of a process that packs and does nothing else: imports, CUDA's start and Triton's included."""
    code = (
        "import json, sys; from pathlib import Path; from sparsepack.packing import PackRequest, pack; "
        "fields = json.loads(sys.argv[1]); pack(PackRequest(**fields | {'output': Path(fields['output'])}))"
    )
    fields = {name: value for name, value in vars(request).items() if value is not None}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, json.dumps(fields, default=str)], check=True, cwd=ROOT)
    return time.perf_counter() - start


def pack_seconds(request: PackRequest, checkpoint: Checkpoint | None = None) -> float:
    """Return the seconds of packing anew. checkpoint -- one whose hash is known; None: it is taken, too"""
    remove(request.output)  # to free the old one's memory takes long too
    start = time.perf_counter()
    pack(request, checkpoint)
    return time.perf_counter() - start


def files_of(artifact: Path) -> list[Path]:
    """Return the file, or those of the folder."""
    return sorted(artifact.iterdir()) if artifact.is_dir() else [artifact]


@click.command()
@click.option("--format", "format_", type=click.Choice(FORMATS_TIMED), default=ZIGZAG, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--layers", type=int, help="Fewer make a smaller model.")
@click.option("--tiny", is_flag=True, help="A model of a few hundred thousand parameters, to try the benchmark.")
@click.option("--shard-gb", default=5.0, show_default=True, help="Of a file of the checkpoint.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@json_option
def main(
    format_: str,
    work: Path,
    layers: int | None,
    tiny: bool,
    shard_gb: float,
    device: str,
    repeats: int,
    json_path: Path | None,
) -> None:
    """Make the checkpoint, unless it is there, pack it, check the artifact, and print the times."""
    size, pattern = TINY if tiny else LLAMA_8B, None if format_ == ZIGZAG else PATTERN
    size = replace(size, layers=layers or size.layers)
    work = work.absolute() / f"{size.name}-{size.layers}{'-6of8' if pattern else ''}-{shard_gb:g}gb"
    folder, artifact = work / "checkpoint", work / format_
    if not (folder / "model.safetensors.index.json").is_file():
        make_shards(folder, size, device, pattern, int(shard_gb * 1e9))
    fields = {"keep": pattern.keep, "of": pattern.of} if pattern else {}
    request = PackRequest(str(folder), artifact, format_, device=device, overwrite=True, **fields)
    whole = process_seconds(request)
    checkpoint = open_checkpoint(folder)
    (check_zigzag if format_ == ZIGZAG else check_sparse24)(checkpoint, artifact)
    checkpoint.source.hash.sha256()  # from now on it is known
    digests = Hashing(files_of(artifact)).sha256()
    source = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    packed = sum(path.stat().st_size for path in files_of(artifact))
    encoder = encoder_rate(format_, size.hidden, size.intermediate, device)
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
    click.echo(
        f"{source / 1e9:.2f} GB of bf16 to {packed / 1e9:.2f} GB of {format_}; {where}, {os.cpu_count()} cores, "
        f"files in {work.parent}; a new process: {whole:.1f} s in all; the encoder alone: {encoder / 1e9:.1f} GB/s\n\n"
        "| seconds | GB/s of bf16 | seconds, the source's hash known | GB/s |\n|--:|--:|--:|--:|"
    )
    rows = []
    for _ in range(repeats):
        rows.append([pack_seconds(request), pack_seconds(request, checkpoint)])
        click.echo("| " + " | ".join(f"{taken:.2f} | {source / taken / 1e9:.2f}" for taken in rows[-1]) + " |")
    if Hashing(files_of(artifact)).sha256() != digests:
        raise click.ClickException(f"{artifact}: other bytes than the first time")
    write_figures(json_path, {"source": source, "packed": packed, "process": whole, "seconds": rows})

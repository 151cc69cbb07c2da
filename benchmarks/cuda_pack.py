"""Seconds to pack a random Llama of 8 billion parameters on a CUDA device, stage by stage, as Markdown.

    python benchmarks/cuda_pack.py [--format slide-int8] [--layers 32] [--shard-gb 5] [--work FOLDER] [--at-once 4 ...]

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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import click
import torch
from nearness import relative_error
from pack_stages import STAGES, Stages
from synthetic import TINY, Size, random, save_config

from sparsepack.files import transfer
from sparsepack.files.atomic import remove
from sparsepack.files.hashing import Hashing
from sparsepack.formats.codecs import slide as slid_matrix
from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.matrices import decode_rows, encode_rows
from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.slid import plan as slid_folder
from sparsepack.formats.slid.artifact import POSITIONS, SCALE, SlidArtifact, value_type
from sparsepack.formats.table import FORMATS
from sparsepack.formats.zigzag import plan as zigzag_gguf
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, HEAD, Checkpoint, open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.records.groups import kept
from sparsepack.models.records.pattern import Pattern
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.packing import PackRequest, pack

ROOT = Path(__file__).parents[1]
EIGHT_BILLION = Size("llama-8b", 4096, 32, 14336, 32, 8, 128256)
SHARD_GB = 5.0  # what transformers filled a shard with for years
Q6_K_ROWS = 4096  # of the embedding and the output, checked against the CPU
PATTERN = Pattern(6, 8)
ZIGZAG = "zigzag-q4_k"
TIMED = (ZIGZAG, "slide-int8", "slide-fp8", "slide-bf16")


def make_shards(folder: Path, size: Size, device: str, pattern: Pattern | None, most: int) -> None:
    """A checkpoint in shards of so many bytes at most, its weights made on `device`, and pruned there to a pattern if
    any."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(save_config(folder, size))
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if held and held + nbytes > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    generator = torch.Generator(device).manual_seed(0)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {name: random(name, shapes[name], size.layers, generator) for name in names}
        weights = {name: _pruned(name, weight, pattern).cpu() for name, weight in made.items()}
        save_file(weights, path, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, path.name)
    # Last: without it, the next run makes them again.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def _pruned(name: str, weight: torch.Tensor, pattern: Pattern | None) -> torch.Tensor:
    return weight * kept(weight.abs(), pattern) if pattern and "_proj." in name else weight


def check_slid(checkpoint: Checkpoint, artifact: Path) -> None:
    """Exit unless the folder is intact and holds what the encoder on the CPU makes."""
    packed = open_artifact(artifact)
    assert isinstance(packed, SlidArtifact)
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
            expected = zigzag.pack(checkpoint.stacked(layer, site)[0])
            if not torch.equal(packed.layers[layer].sites[site].matrix.blocks, expected):
                raise click.ClickException(f"blk.{layer}.{site} is not what the CPU packs")
    for name, matrix in ((EMBEDDING, packed.embedding), (HEAD, packed.output)):
        weights = checkpoint.tensor(name)[:Q6_K_ROWS]
        found = matrix.blocks[:Q6_K_ROWS]
        errors = [_error(blocks, weights, matrix.type) for blocks in (found, encode_rows(weights, matrix.type))]
        if errors[0] > errors[1] * 1.001:
            raise click.ClickException(f"{name}: relative error {errors[0]:.6f}, on the CPU {errors[1]:.6f}")
    click.echo(f"{artifact}: intact; blocks 0 and {checkpoint.layers - 1} bit for bit the CPU's", err=True)


def _error(blocks: torch.Tensor, weights: torch.Tensor, kind: str) -> float:
    return relative_error(decode_rows(blocks, kind), weights.float())


@dataclass(frozen=True)
class Packing:
    """What is known of a kind of artifact.

    reader, encoders -- as `Stages.counted` takes them
    at_once -- module and name of the constant that says how many are in work
    check   -- of what was packed; encode -- one matrix
    pattern -- of its weights; None: not pruned
    """

    reader: ModuleType
    encoders: tuple[tuple[ModuleType, str], ...]
    at_once: tuple[ModuleType, str]
    check: Callable[[Checkpoint, Path], None]
    encode: Callable[[torch.Tensor], object]
    pattern: Pattern | None = None


def packing(format: str) -> Packing:
    """What is known of a format."""
    if format == ZIGZAG:
        encoders = ((zigzag_gguf, "encode_rows"), (zigzag, "pack"))
        return Packing(zigzag_gguf, encoders, (transfer, "CUDA_AT_ONCE"), check_zigzag, zigzag.pack)
    dtype = value_type(FORMATS[format]).dtype
    return Packing(
        slid_folder,
        ((slid_matrix, "encode"),),
        (slid_folder, "SLID_AT_ONCE"),
        check_slid,
        lambda weight: slid_matrix.encode(weight, Slide(PATTERN), dtype),
        PATTERN,
    )


def timed_pack(
    request: PackRequest, how: Packing, at_once: int, checkpoint: Checkpoint | None = None
) -> tuple[float, Counter[str], float]:
    """Seconds in total, by stage, and GB that the device held at most.

    checkpoint -- one whose hash is known; None: it is taken too
    """
    remove(request.output)  # to free the old one's memory takes long too
    on_cuda = request.device.startswith("cuda")
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    stages = Stages()
    with stages.counted(how.reader, how.encoders), patch.object(*how.at_once, at_once):
        start = time.perf_counter()
        pack(request, checkpoint)
        seconds = time.perf_counter() - start
    return seconds, stages.seconds, torch.cuda.max_memory_reserved() / 1e9 if on_cuda else 0.0


def encoder_seconds(how: Packing, size: Size, device: str) -> tuple[float, int]:
    """The median seconds of the encoder alone for the widest matrix, which lies on the device, and its bytes."""
    weight = torch.randn(size.intermediate, size.hidden, device=device).to(torch.bfloat16)
    weight = _pruned("up_proj.weight", weight, how.pattern)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        how.encode(weight)
        if weight.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]), weight.nbytes


def process_seconds(request: PackRequest) -> float:
    """The seconds of a process that packs and does nothing else: imports, CUDA's start and Triton's included."""
    code = (
        "import json, sys; from pathlib import Path; from sparsepack.packing import PackRequest, pack; "
        "asked = json.loads(sys.argv[1]); pack(PackRequest(**asked | {'output': Path(asked['output'])}))"
    )
    asked = {name: value for name, value in vars(request).items() if value is not None}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, json.dumps(asked, default=str)], check=True, cwd=ROOT)
    return time.perf_counter() - start


def files_of(artifact: Path) -> list[Path]:
    """The file, or those of the folder."""
    return sorted(artifact.iterdir()) if artifact.is_dir() else [artifact]


def digests_of(artifact: Path) -> list[str]:
    """SHA-256 of each of its files."""
    return Hashing(files_of(artifact)).sha256()


@click.command()
@click.option("--format", "format_", type=click.Choice(TIMED), default=ZIGZAG, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("/tmp/sparsepack-bench"), show_default=True)
@click.option("--layers", type=int, help="Fewer make a smaller model.")
@click.option("--tiny", is_flag=True, help="A model of a few hundred thousand parameters, to try this script.")
@click.option("--shard-gb", default=SHARD_GB, show_default=True, help="Of a file of the checkpoint.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--at-once", multiple=True, type=int, help="Instead of the format's own number.")
@click.option("--repeats", default=3, show_default=True)
def main(
    format_: str,
    work: Path,
    layers: int | None,
    tiny: bool,
    shard_gb: float,
    device: str,
    at_once: tuple[int, ...],
    repeats: int,
) -> None:
    """Make the checkpoint, unless it is there, pack it, check the artifact, and print the times."""
    how, size = packing(format_), TINY if tiny else EIGHT_BILLION
    size = replace(size, layers=layers or size.layers)
    pruned = f"-{how.pattern.keep}of{how.pattern.of}" if how.pattern else ""
    shards = "" if shard_gb == SHARD_GB else f"-{shard_gb:g}gb"
    work = work.absolute() / f"{size.name}-{size.layers}{pruned}{shards}"
    folder, artifact = work / "checkpoint", work / format_
    if not (folder / "model.safetensors.index.json").is_file():
        start = time.perf_counter()
        make_shards(folder, size, device, how.pattern, int(shard_gb * 1e9))
        click.echo(f"made {folder} in {time.perf_counter() - start:.1f} s", err=True)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    given = {"keep": how.pattern.keep, "of": how.pattern.of} if how.pattern else {}
    request = PackRequest(str(folder), artifact, format_, device=device, overwrite=True, **given)
    whole = process_seconds(request)
    checkpoint = open_checkpoint(folder)
    how.check(checkpoint, artifact)
    checkpoint.source.hash.sha256()  # from now on it is known
    digests = digests_of(artifact)

    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    source, packed = sum(files), sum(path.stat().st_size for path in files_of(artifact))
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
    alone, nbytes = encoder_seconds(how, size, device)
    click.echo(
        f"{source / 1e9:.2f} GB of bf16 in {len(files)} shards to {packed / 1e9:.2f} GB of {format_}; {where}, "
        f"{os.cpu_count()} cores, files in {work.parent}; a new process: {whole:.1f} s in all; "
        f"the encoder alone: {nbytes / alone / 1e9:.1f} GB/s of bf16\n\n"
        f"Seconds by stage are summed over the threads; in brackets, GB of all the bf16 for one of them.\n\n"
        f"| at once | seconds | GB/s of bf16 | the source's hash known | {' | '.join(STAGES)} | GB on the device |\n"
        f"|--:{'|--:' * (len(STAGES) + 4)}|"
    )
    on_cuda = device.startswith("cuda")
    for _ in range(repeats):
        for number in (at_once or (getattr(*how.at_once),)) if on_cuda else (1,):
            seconds, stages, held = timed_pack(request, how, number)
            known, *_ = timed_pack(request, how, number, checkpoint)
            rates = (source / taken / 1e9 for taken in (seconds, known))
            cells = " | ".join(_cell(stages[stage], source) for stage in STAGES)
            click.echo(f"| {number} | {seconds:.2f} | {' | '.join(f'{r:.2f}' for r in rates)} | {cells} | {held:.1f} |")
    if digests_of(artifact) != digests:
        raise click.ClickException(f"{artifact}: other bytes than the first time")


def _cell(seconds: float, source: int) -> str:
    return f"{seconds:.2f} ({source / max(seconds, 1e-9) / 1e9:.1f})" if seconds > 0.005 else "0.00"


if __name__ == "__main__":
    main()

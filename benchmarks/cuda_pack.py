"""Seconds to pack a random Llama of 8 billion parameters on a CUDA device, stage by stage, as Markdown.

    python benchmarks/cuda_pack.py [--layers 32] [--work FOLDER] [--at-once 1 --at-once 4 ...]

The artifact is checked first: its hashes, and matrices of the first and the last block against the encoders on the CPU.
The files lie in the page cache when the times are taken; `--work /dev/shm` leaves the disk out of the writing too.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch
from synthetic import Size, random, save_config

from sparsepack.artifacts import placing, transfer
from sparsepack.artifacts.gguf import zigzag as zigzag_gguf
from sparsepack.artifacts.open import read_packed
from sparsepack.codecs import zigzag
from sparsepack.codecs.matrices import decode_rows, encode_rows
from sparsepack.files.hashing import sha256_file
from sparsepack.models.checkpoint import EMBEDDING, HEAD, Checkpoint, open_checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.skeleton import parameter_shapes
from sparsepack.models.sources import SafetensorsSource
from sparsepack.pack import PackRequest, pack

ROOT = Path(__file__).parents[1]
EIGHT_BILLION = Size("llama-8b", 4096, 32, 14336, 32, 8, 128256)
SHARD_BYTES = 5_000_000_000  # what transformers fills a shard with
Q6_K_ROWS = 4096  # of the embedding and the output, checked against the CPU
STAGES = ("hash of the source", "read, to the device", "encode", "from the device", "hash", "write", "fsync")


def make_shards(folder: Path, size: Size, device: str) -> None:
    """A checkpoint in shards as a real one's, its weights made on `device`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(save_config(folder, size))
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if held and held + nbytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    generator = torch.Generator(device).manual_seed(0)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {name: random(name, shapes[name], size.layers, generator).cpu() for name in names}
        save_file(weights, path, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, path.name)
    # Last: without it, the next run makes them again.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def check(checkpoint: Checkpoint, artifact: Path) -> None:
    """Exit unless the artifact is intact and holds what the encoders on the CPU make."""
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
    expected = weights.float()
    return float((decode_rows(blocks, kind) - expected).norm() / expected.norm())


class Stages:
    """Seconds by stage, summed over threads. Waiting for the device, or for another thread's use of it, counts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += time.perf_counter() - start

    def timed(self, stage: str, function: Callable[..., Any], wait: bool = False) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            with self(stage):
                result = function(*values)
                if wait and result.is_cuda:
                    torch.cuda.current_stream(result.device).synchronize()
                return result

        return run

    def pieces(self, data: torch.Tensor) -> Iterator[memoryview]:
        pieces = transfer.host_pieces(data)
        while True:
            with self("from the device"):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def digest(self) -> Any:
        digest = hashlib.sha256()
        return SimpleNamespace(update=self.timed("hash", digest.update), hexdigest=digest.hexdigest)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the context, `pack` adds to the seconds."""
        jobs = self.timed("jobs", placing._write)
        with (
            patch.object(SafetensorsSource, "sha256", self.timed(STAGES[0], SafetensorsSource.sha256)),
            patch.object(zigzag_gguf, "stacked_on", self.timed(STAGES[1], transfer.stacked_on)),
            patch.object(zigzag_gguf, "encode_rows", self.timed("encode", encode_rows, wait=True)),
            patch.object(zigzag, "pack", self.timed("encode", zigzag.pack, wait=True)),
            patch.object(placing, "host_pieces", self.pieces),
            patch.object(placing, "hashlib", SimpleNamespace(sha256=self.digest)),
            patch.object(placing, "_write", jobs),
            patch.object(os, "fsync", self.timed("fsync", os.fsync)),
        ):
            yield
        # Arguments are evaluated before the call that they are for: reading stands beside encoding, not within.
        self.seconds["write"] = self.seconds.pop("jobs") - sum(self.seconds[stage] for stage in STAGES[1:5])


def timed_pack(request: PackRequest, at_once: int) -> tuple[float, Counter[str], float]:
    """Seconds in total, by stage, and GB that the device held at most."""
    on_cuda = request.device.startswith("cuda")
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    stages = Stages()
    with stages.counted(), patch.object(transfer, "CUDA_AT_ONCE", at_once):
        start = time.perf_counter()
        pack(request)
        seconds = time.perf_counter() - start
    return seconds, stages.seconds, torch.cuda.max_memory_reserved() / 1e9 if on_cuda else 0.0


def process_seconds(request: PackRequest) -> float:
    """The seconds of a process that packs and does nothing else: imports, CUDA's start and Triton's included."""
    code = (
        "import sys; from pathlib import Path; from sparsepack.pack import PackRequest, pack; "
        "pack(PackRequest(sys.argv[1], Path(sys.argv[2]), device=sys.argv[3], overwrite=True))"
    )
    start = time.perf_counter()
    arguments = [request.model, str(request.output.absolute()), request.device]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=ROOT)
    return time.perf_counter() - start


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("/tmp/sparsepack-bench"), show_default=True)
@click.option("--layers", default=EIGHT_BILLION.layers, show_default=True, help="Fewer make a smaller model.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--at-once", multiple=True, type=int, default=[transfer.CUDA_AT_ONCE], show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(work: Path, layers: int, device: str, at_once: tuple[int, ...], repeats: int) -> None:
    """Make the checkpoint, unless it is there, pack it, check the artifact, and print the times."""
    size = replace(EIGHT_BILLION, layers=layers)
    work = work.absolute() / f"{size.name}-{layers}"
    folder, artifact = work / "checkpoint", work / "zigzag.gguf"
    if not (folder / "model.safetensors.index.json").is_file():
        start = time.perf_counter()
        make_shards(folder, size, device)
        click.echo(f"made {folder} in {time.perf_counter() - start:.1f} s", err=True)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    request = PackRequest(str(folder), artifact, device=device, overwrite=True)
    whole = process_seconds(request)
    checkpoint = open_checkpoint(folder)
    check(checkpoint, artifact)
    digest = sha256_file(artifact)

    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    source, packed = sum(shards), artifact.stat().st_size
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
    click.echo(
        f"{source / 1e9:.2f} GB of bf16 in {len(shards)} shards to {packed / 1e9:.2f} GB of zigzag Q4_K; {where}, "
        f"{os.cpu_count()} cores, files in {work.parent}; a new process: {whole:.1f} s in all\n\n"
        f"Seconds by stage are summed over the threads.\n\n"
        f"| tensors at once | seconds | GB/s of bf16 | {' | '.join(STAGES)} | GB on the device |\n"
        f"|--:{'|--:' * (len(STAGES) + 3)}|"
    )
    for _ in range(repeats):
        for number in at_once if device.startswith("cuda") else (1,):
            seconds, stages, held = timed_pack(request, number)
            cells = " | ".join(f"{stages[stage]:.2f}" for stage in STAGES)
            click.echo(f"| {number} | {seconds:.2f} | {source / seconds / 1e9:.2f} | {cells} | {held:.1f} |")
    if sha256_file(artifact) != digest:
        raise click.ClickException(f"{artifact}: other bytes than the first time")


if __name__ == "__main__":
    main()

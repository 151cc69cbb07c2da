"""Seconds until a model is loaded, beside reading its file, and the memory that it then takes; one JSON line.

    python benchmarks/cpu_load.py FILE [--backend cpu|reference|llama.cpp] [--threads 2] [--verify]

A process of its own for each figure, so that the peak is this model's. With --cold the file is put out of the page
cache before it is read, and again before it is loaded: what the first start of a day takes.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import cpu_setting  # noqa: F401  (before torch)
import torch

STEPS = 8
_CONTEXT = 1024


def read_seconds(path: Path) -> float:
    """As cat reads: into one small buffer, over and over."""
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Put a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_bytes(which: str) -> int:
    """Resident memory of this process, mapped files included: "VmRSS" now, "VmHWM" the most ever.

    Not `getrusage`, whose peak counts the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


def _ours(path: Path, backend: str, threads: int, verify: bool) -> Callable[[], Any]:
    from sparsepack.formats.open import read_packed
    from sparsepack.runtime.engine import Engine

    torch.set_num_threads(threads)
    if backend == "cpu":
        from sparsepack.runtime.cpu.dispatch import native

        native()  # linking the kernels is no part of loading a model

    def load() -> Callable[[], Any]:
        engine = Engine(read_packed(path, verify=verify), context=_CONTEXT, backend=backend, threads=threads)
        return lambda: [engine.prefill([1, 2, 3]), *(engine.step(4) for _ in range(STEPS))]

    return load


def _peer(path: Path, threads: int) -> Callable[[], Any]:
    from llama_cpp_peer import LlamaCpp, expect_runs

    expect_runs(path)  # before anything is timed

    def load() -> Callable[[], Any]:
        peer = LlamaCpp(path, _CONTEXT)
        peer.threads(threads)
        return lambda: [peer.decode([1, 2, 3]), *(peer.decode([4]) for _ in range(STEPS))]

    return load


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--backend", default="cpu", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--verify", is_flag=True, help="Check the tensors' hashes, as our reader does unless told not to.")
@click.option("--cold", is_flag=True, help="From the disk, not from the page cache.")
def main(path: Path, backend: str, threads: int, verify: bool, cold: bool) -> None:
    """Print the figures of one load."""
    load = _peer(path, threads) if backend == "llama.cpp" else _ours(path, backend, threads, verify)
    if cold:
        forget(path)
        reading = read_seconds(path)
        forget(path)
    else:
        read_seconds(path)
        reading = min(read_seconds(path) for _ in range(3))
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    run = load()
    loading = time.perf_counter() - start
    run()
    figures = {"read_seconds": reading, "load_seconds": loading, "peak_bytes": memory_bytes("VmHWM")}
    print(json.dumps(figures | {"before_bytes": before, "file_bytes": path.stat().st_size}))


if __name__ == "__main__":
    main()

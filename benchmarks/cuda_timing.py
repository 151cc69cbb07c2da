"""What the GPU benchmarks share: several ways in turns, the memory's bandwidth, the head of a report."""

import statistics
from collections.abc import Callable

import torch

from sparsepack.bench.graph_timing import graph_seconds


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each, all of them in turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(taken) for name, taken in samples.items()}


def read_bandwidth() -> float:
    """Bytes a second that the memory delivers: the largest of 2 GiB of float32, the fastest of ten times."""
    array = torch.ones(1 << 29, device="cuda")
    run = graph_seconds(lambda _: array.max(), 1)
    return array.nbytes / min(run() for _ in range(10))


def device_line() -> str:
    """The GPU, its driver's CUDA and torch, for the head of a report."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"

"""What the GPU benchmarks share: the memory's bandwidth, and the head of a report."""

import click
import torch

from sparsepack.bench.linears import graph_seconds


def read_bandwidth() -> float:
    """Bytes a second that the memory delivers: the largest of 2 GiB of float32, the fastest of ten times."""
    array = torch.ones(1 << 29, device="cuda")
    run = graph_seconds(lambda _: array.max(), 1)
    return array.nbytes / min(run() for _ in range(10))


def device_line() -> str:
    """The GPU, its driver's CUDA and torch, for the head of a report."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def announced_bandwidth(more: str = "") -> float:
    """What `read_bandwidth` finds, printed beside the GPU and what else is to be said at the head of a report."""
    bandwidth = read_bandwidth()
    click.echo(f"{device_line()}; read bandwidth {bandwidth / 1e9:.0f} GB/s{more}")
    return bandwidth

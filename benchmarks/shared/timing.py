"""What every timed comparison needs: check first, interleave, rotate buffers, say the share of the bound."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor

from sparsepack.bench.linears import graph_seconds

Name = TypeVar("Name")
Result = TypeVar("Result")

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file, too."
)


def write_figures(path: Path | None, figures: Any) -> None:
    """Write figures as JSON, if there is a path."""
    if path:
        path.write_text(json.dumps(figures, indent=1))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`, in their dtype."""
    return float((found - expected).norm() / expected.norm())


def check_close(what: str, error: float, limit: float) -> float:
    """Return an error. Raise `RuntimeError` where it exceeds the limit or is NaN: wrong results are not timed."""
    if not error <= limit:
        raise RuntimeError(f"{what}: wrong by {error:.3g}, expected at most {limit:.3g}; not timed")
    return error


def interleave(runs: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """Run all sides once a round, so that what slows the machine for a while slows all of them; return their results.
    `warm_up` rounds before them are not kept."""
    samples: dict[Name, list[Result]] = {name: [] for name in runs}
    for round in range(-warm_up, rounds):
        for name, run in runs.items():
            result = run()
            if round >= 0:
                samples[name].append(result)
    return samples


def interleaved(runs: Mapping[Name, Callable[[], float]], rounds: int, warm_up: int = 0) -> dict[Name, float]:
    """Return the median of what each side returns, such as seconds, all sides interleaved."""
    return {name: statistics.median(taken) for name, taken in interleave(runs, rounds, warm_up).items()}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of a ratio taken within each round: what slows the machine slows both."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def rotation(each: int, total: int, copies: int = 2, runs: int = 1) -> tuple[int, int]:
    """Return how many copies of a buffer of `each` bytes no cache holds, and how many runs go through all of them.

    total  -- bytes that the copies have at least
    copies -- as many at least
    runs   -- as many at least, a multiple of the copies
    """
    copies = max(copies, -(-total // each))
    return copies, copies * -(-runs // copies)


def of_bound(nbytes: float, seconds: float, bandwidth: float) -> str:
    """Return which share of the read bandwidth a time is, for bytes that had to be read."""
    return f"{nbytes / seconds / bandwidth:.0%}"


def gpu_read_bandwidth() -> float:
    """Return bytes a second that the GPU's memory delivers: the maximum of 2 GiB of float32, the fastest of ten."""
    array = torch.ones(1 << 29, device="cuda")
    run = graph_seconds(lambda _: array.max(), 1)
    return array.nbytes / min(run() for _ in range(10))


def device_line() -> str:
    """Return the GPU, its driver's CUDA and torch, for the head of a report."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def announced_bandwidth(more: str = "") -> float:
    """Print and return the GPU's read bandwidth, behind the GPU and whatever else belongs to the head of a report."""
    bandwidth = gpu_read_bandwidth()
    click.echo(f"{device_line()}; read bandwidth {bandwidth / 1e9:.0f} GB/s{more}")
    return bandwidth

"""What the one pass over text collects: a row of `COLLECTORS` each. What is here loops over the rows."""

from collections.abc import Callable, Mapping

from torch import Tensor

from sparsepack.calibrate.collectors.attention import ATTENTION
from sparsepack.calibrate.collectors.moments import MOMENTS
from sparsepack.calibrate.collectors.scores import SCORES
from sparsepack.models.families import SITES

COLLECTORS = (SCORES, MOMENTS, ATTENTION)

Statistics = dict[str, Tensor]
"""What was collected in one decoder block, by PLACE.NAME: `mlp_in.second_moment`."""

_PLACES = {"site": SITES, "attention": ("attention",)}


def count(into: Statistics, place: str, first: Tensor, second: Tensor) -> None:
    """Count what has come to a place: a site's input and column norms, or the attention's query and key."""
    for collector in COLLECTORS:
        if place in _PLACES[collector.at]:
            found = zip(collector.names, collector.count(first, second), strict=True)
            _add_to(into, {f"{place}.{name}": value for name, value in found})


def added(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two runs as those of one run over both texts."""
    total = dict(one)
    _add_to(total, other)
    return total


def named(layer: int, statistics: Statistics) -> dict[str, Tensor]:
    """A block's statistics by the names that they have in a file."""
    return {f"layers.{layer}.{name}": value for name, value in statistics.items()}


def of_block(layer: int, tensors: Mapping[str, Tensor]) -> Statistics:
    """The inverse of `named`, from a file that may hold other blocks too; KeyError where something is missing."""
    return {name: tensors[f"layers.{layer}.{name}"] for name in _adders()}


def check(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor from a file is what is collected by that PLACE.NAME."""
    row = next(row for row in COLLECTORS for place in _PLACES[row.at] for n in row.names if f"{place}.{n}" == name)
    rank = len(row.shape)
    fits = value.dtype == row.dtype and value.ndim == rank
    fits = fits and all(size == wanted for size, wanted in zip(value.shape, row.shape, strict=True) if wanted)
    if not fits or not value.numel() or not bool(((value >= 0) & (value < float("inf"))).all()):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)} or holds what is no count")


def _add_to(into: Statistics, found: Statistics) -> None:
    add = _adders()
    for name, value in found.items():
        into[name] = add[name](into[name], value) if name in into else value


def _adders() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By PLACE.NAME of everything that is collected, how two of it add up."""
    return {f"{place}.{name}": row.add for row in COLLECTORS for place in _PLACES[row.at] for name in row.names}

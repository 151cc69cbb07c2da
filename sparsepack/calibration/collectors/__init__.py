"""What the one pass over text collects: a row of `COLLECTORS` each. What is here loops over the rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from sparsepack.calibration.collectors.attention import ATTENTION
from sparsepack.calibration.collectors.missed import MISSED
from sparsepack.calibration.collectors.moments import MOMENTS
from sparsepack.calibration.collectors.neurons import NEURONS
from sparsepack.calibration.collectors.products import PRODUCTS
from sparsepack.calibration.collectors.scores import SCORES
from sparsepack.models.families import SITES

COLLECTORS = (SCORES, MOMENTS, ATTENTION, PRODUCTS, MISSED, NEURONS)

Statistics = dict[str, Tensor]
"""The statistics of one decoder block stand under PLACE.NAME: `mlp_in.second_moment`."""

_OF_ATTENTION = ("attention",)
_PLACES = {"site": SITES, "attention": _OF_ATTENTION, "window": _OF_ATTENTION, "neurons": ("neurons",)}


def count(into: Statistics, at: str, place: str, *seen: Any) -> None:
    """Count what has come to a place of the kind `at`: see `Collector`."""
    for collector in COLLECTORS:
        if collector.at == at:
            found = zip(collector.names, collector.count(*seen), strict=True)
            _add_to(into, {f"{place}.{name}": value for name, value in found})


def added(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two runs as those of one run over both texts; what one of them lacks is left out."""
    total = {name: value for name, value in one.items() if name in other}
    _add_to(total, {name: other[name] for name in total})
    return total


def named(layer: int, statistics: Statistics) -> dict[str, Tensor]:
    """A block's statistics by the names that they have in a file."""
    return {f"layers.{layer}.{name}": value for name, value in statistics.items()}


def of_block(layer: int, tensors: Mapping[str, Tensor]) -> Statistics:
    """The inverse of `named`, from a file that may hold other blocks too; KeyError where something is missing.

    What was made before a collector was `added_later` is without it.
    """
    return {name: tensors[f"layers.{layer}.{name}"] for name in _kept(layer, tensors)}


def _kept(layer: int, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The PLACE.NAME of each tensor of a block that must be in the file."""
    for row in COLLECTORS:
        for place in _PLACES[row.at]:
            names = [f"{place}.{name}" for name in row.names]
            if not row.added_later or any(f"layers.{layer}.{name}" in tensors for name in names):
                yield from names


def check(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor from a file is what is collected by that PLACE.NAME."""
    row = next(row for row in COLLECTORS for place in _PLACES[row.at] for n in row.names if f"{place}.{n}" == name)
    rank = len(row.shape)
    fits = value.dtype == row.dtype and value.ndim == rank
    fits = fits and all(size == wanted for size, wanted in zip(value.shape, row.shape, strict=True) if wanted)
    size = value.abs() if row.signed else value
    if not fits or not value.numel() or not bool(((size >= 0) & (size < float("inf"))).all()):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)} or holds what is no count")


def _add_to(into: Statistics, found: Statistics) -> None:
    add = _adders()
    for name, value in found.items():
        into[name] = add[name](into[name], value) if name in into else value


def _adders() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By PLACE.NAME of everything that is collected, how two of it add up."""
    return {f"{place}.{name}": row.add for row in COLLECTORS for place in _PLACES[row.at] for name in row.names}

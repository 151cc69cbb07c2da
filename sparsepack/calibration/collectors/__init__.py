"""What the one pass over text collects: a row of `COLLECTORS` each. What is here loops over the rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibration.collectors.attention import ATTENTION
from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.experts import EXPERTS
from sparsepack.calibration.collectors.missed import MISSED
from sparsepack.calibration.collectors.moments import MOMENTS
from sparsepack.calibration.collectors.neurons import NEURONS
from sparsepack.calibration.collectors.outputs import OUTPUTS
from sparsepack.calibration.collectors.residual import RESIDUAL
from sparsepack.calibration.collectors.scores import SCORES
from sparsepack.models.family import SITES

COLLECTORS = (SCORES, MOMENTS, ATTENTION, MISSED, NEURONS, EXPERTS, RESIDUAL, OUTPUTS)

Statistics = dict[str, Tensor]
"""The statistics of one decoder block stand under PLACE.NAME: `mlp_in.second_moment`."""

_OF_ATTENTION = ("attention",)
_PLACES = {
    "site": SITES,
    "attention": _OF_ATTENTION,
    "window": _OF_ATTENTION,
    "neurons": ("neurons",),
    "experts": ("experts",),
    "residual": ("residual",),
    "outputs": _OF_ATTENTION,
}


def _rows() -> dict[str, Collector]:
    """The row of each PLACE.NAME."""
    return {f"{place}.{name}": row for row in COLLECTORS for place in _PLACES[row.at] for name in row.names}


def count(into: Statistics, at: str, place: str, *seen: Any) -> None:
    """Count what has come to a place of the kind `at`: see `Collector`."""
    for collector in COLLECTORS:
        if collector.at == at:
            for name, value in zip(collector.names, collector.count(*seen), strict=True):
                key = f"{place}.{name}"
                if key not in into:  # the first part then launches what every later one does, as one who records needs
                    into[key] = torch.zeros(value.shape, dtype=collector.dtype, device=value.device)
                into[key] = collector.add(into[key], value)


def add_to(into: Statistics, found: Mapping[str, Tensor]) -> None:
    """Add what was counted elsewhere, by PLACE.NAME. Nothing of it is kept: its tensors may be used again."""
    rows = _rows()
    for name, value in found.items():
        into[name] = rows[name].add(into[name], value) if name in into else value.clone()


def added(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two runs as those of one run over both texts."""
    return {name: row.add(one[name].clone(), other[name]) for name, row in _rows().items() if name in one}


def named(layer: int, statistics: Statistics) -> dict[str, Tensor]:
    """A block's statistics by the names that they have in a file."""
    return {f"layers.{layer}.{name}": value for name, value in statistics.items()}


def of_block(layer: int, tensors: Mapping[str, Tensor]) -> Statistics:
    """The inverse of `named`, from a file that may hold other blocks too; KeyError where something is missing that
    every block has."""
    names = {name: f"layers.{layer}.{name}" for name in _rows()}
    other = (
        NEURONS if f"layers.{layer}.experts.{EXPERTS.names[0]}" in tensors else EXPERTS
    )  # an MLP is one or the other
    missable = {name for name, row in _rows().items() if row.of_runs or row.later or row is other}
    return {name: tensors[key] for name, key in names.items() if key in tensors or name not in missable}


def check(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor from a file is what is collected by that PLACE.NAME."""
    row = _rows()[name]
    rank = len(row.shape)
    fits = value.dtype == row.dtype and value.ndim == rank
    fits = fits and all(size == wanted for size, wanted in zip(value.shape, row.shape, strict=True) if wanted)
    size = value.abs() if row.signed else value
    if not fits or not value.numel() or not bool(((size >= 0) & (size < float("inf"))).all()):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)} or holds what is no count")

"""The second moments of the residual stream that a calibration has: the section `residual` of its manifest.

    runs   how many runs of consecutive blocks have a sum of their own (`collectors.residual`)
    norms  the sums are over so many norms of each block

The section is None in a calibration of a model that cannot be rotated, and missing in one from before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepack.calibration.collectors import Statistics
from sparsepack.calibration.collectors.residual import ends_run, run_count
from sparsepack.files.stored import Size, Stored
from sparsepack.models.checkpoint.checkpoint import Checkpoint

PRODUCT = "residual.product"


class StoredResidual(Stored):
    """The section as it is read from a file."""

    runs: Size
    norms: Size


def residual_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The section for a model, JSON-able."""
    stream = checkpoint.family.residual
    if stream is None:
        return None
    hidden = int(checkpoint.config.hidden_size)
    return {"runs": run_count(checkpoint.layers, hidden), "norms": len(stream.readers)}


def check_residual(section: Mapping[str, Any] | None, layers: Sequence[Statistics]) -> None:
    """Raise ValueError unless the last blocks of all runs, and no others, have sums, square ones of one size."""
    runs = 0 if section is None else section["runs"]
    if runs > len(layers):
        raise ValueError(f"residual: {runs} runs of {len(layers)} blocks")
    shapes = set()
    for layer, statistics in enumerate(layers):
        if (PRODUCT in statistics) != ends_run(layer, len(layers), runs):
            raise ValueError(f"layers.{layer}.{PRODUCT}: the manifest says something else of it")
        if PRODUCT in statistics:
            shapes.add(tuple(statistics[PRODUCT].shape))
    if len(shapes) > 1 or any(rows != columns for rows, columns in shapes):
        raise ValueError(f"{PRODUCT} is {sorted(shapes)}, expected square ones of one size")

"""How a product with a zigzag matrix is laid over the GPU: the parameters that `kernels/zigzag_gemv.cu` leaves open.

`sparsepack profile --device cuda` measures them once per kind of GPU (`profile.py`); what it found is kept below
~/.cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparsepack.runtime import tuning as profiles
from sparsepack.runtime.tuning import Shape

SCHEMA = 2
PRODUCERS = 4
"""Warps of a block that bring columns, where any do."""
MOST_WARPS = 32
"""Of a block, those that bring columns included."""
MOST_STAGES = 32
"""More than any geometry that is tried."""


@dataclass(frozen=True)
class Geometry:
    """group  -- bands of 256 rows that lie together, column by column: 1, 2, 4 or 8
    warps  -- of a block that multiply; a multiple of `group`
    stages -- of 16 columns that a block has on their way at once, brought by warps of their own; 0: warps that multiply
              read their columns themselves, which suits blocks that read few (where all are active, and for several
              inputs, there is a ring all the same)
    splits -- blocks that share the columns of a group
    """

    group: int = 1
    warps: int = 8
    stages: int = 16
    splits: int = 8

    def __post_init__(self) -> None:
        sets, rest = divmod(self.warps, self.group)
        if rest or self.stages % sets or self.stages % PRODUCERS:
            raise ValueError(f"{self}: warps must be a multiple of group, stages of warps / group and of {PRODUCERS}")
        if self.warps + PRODUCERS > MOST_WARPS or self.stages > MOST_STAGES:
            raise ValueError(f"{self}: at most {MOST_WARPS - PRODUCERS} warps and {MOST_STAGES} stages")

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + (PRODUCERS if self.stages else 0))


def geometry(shape: Shape, device: torch.device, gate: bool = False) -> Geometry | None:
    """What was measured to suit a matrix on this kind of GPU; None where nothing was, or nothing that serves a gate."""
    found = profiled(torch.cuda.get_device_name(device)).get(shape)
    return None if found is None or (gate and found.group % 2) else found


def profile_path(gpu: str) -> Path:
    """Where the profile of a kind of GPU is kept, by its name."""
    return profiles.tuned_path("cuda", gpu)


def read_profile(path: Path) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return profiles.read_rows(path, SCHEMA, geometry_of)


@cache
def profiled(gpu: str) -> Mapping[Shape, Geometry]:
    """The geometries measured on a kind of GPU; empty where `sparsepack profile` never ran there."""
    return {shape: geometry_of(row) for shape, row in read_profile(profile_path(gpu)).items()}


def geometry_of(row: Mapping[str, Any]) -> Geometry:
    """A geometry from a row of a profile. Raises `ValueError`, `KeyError` or `TypeError` where it is impossible."""
    values = {field.name: int(row[field.name]) for field in fields(Geometry)}
    if not all((name == "stages" or value) and 0 <= value <= 64 for name, value in values.items()):
        raise ValueError(f"{values}: expected 1 to 64, stages from 0 on")
    return Geometry(**values)

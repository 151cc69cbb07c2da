"""How a zigzag matrix lies in memory while it runs: the parameters that `native/layout.h` leaves open.

`sparsepack profile` measures them once per machine (`profile.py`); what it found is kept below ~/.cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.runtime import tuning as profiles
from sparsepack.runtime.cpu.dispatch import instruction_set
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.tuning import Shape

QUAD_ROWS = 1024
SCHEMA = 1


@dataclass(frozen=True)
class Geometry:
    """span -- quads (1024 rows) that lie together, the order; tile -- columns that are multiplied together while the
    next so many are fetched into the cache, the distance of prefetching."""

    span: int
    tile: int


def geometry(shape: Shape, threads: int) -> Geometry:
    """What suits a matrix: as measured on this machine, or else what did best on the machines that we had."""
    found = profiled(instruction_set(), threads).get(shape)
    return found or Geometry(span=min(-(-shape[0] // QUAD_ROWS), 4), tile=64)


def profile_path(instruction_set: str, threads: int) -> Path:
    """Where this machine's profile is kept."""
    return profiles.profile_path("cpu", cpu_info(), instruction_set, threads)


def read_profile(path: Path) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return profiles.read_rows(path, SCHEMA, _geometry)


@cache
def profiled(instruction_set: str, threads: int) -> Mapping[Shape, Geometry]:
    """The geometries measured on this machine; empty where `sparsepack profile` never ran."""
    rows = read_profile(profile_path(instruction_set, threads))
    return {shape: _geometry(row) for shape, row in rows.items()}


def _geometry(row: Mapping[str, Any]) -> Geometry:
    span, tile = int(row["span"]), int(row["tile"])
    if not 1 <= span <= 16 or not 8 <= tile <= 256 or tile % 8:
        raise ValueError(f"span {span}, tile {tile}")
    return Geometry(span, tile)

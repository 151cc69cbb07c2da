"""How a zigzag matrix lies in memory while it runs: the parameters that `native/layout/layout.h` leaves open.

`sparsepack tune` measures them once per machine (`tune.py`); what it found is kept below ~/.cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.runtime import tuning
from sparsepack.runtime.cpu.dispatch import instruction_set
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.tuning import Shape

QUAD_ROWS = 1024
SCHEMA = 1


@dataclass(frozen=True)
class CpuTileConfig:
    """What llama.cpp calls a repacked layout, and CUTLASS a tile shape.

    span -- quads (1024 rows) that lie together, the order; tile -- columns that are multiplied together while the
    next so many are fetched into the cache, the distance of prefetching."""

    span: int
    tile: int


def tile_config(shape: Shape, threads: int) -> CpuTileConfig:
    """What suits a matrix: as measured on this machine, or else what did best on the machines that we had."""
    found = tuned(instruction_set(), threads).get(shape)
    return found or CpuTileConfig(span=min(-(-shape[0] // QUAD_ROWS), 4), tile=64)


def tuned_path(instruction_set: str, threads: int) -> Path:
    """The file that keeps what was measured on this machine."""
    return tuning.tuned_path("cpu", cpu_info(), instruction_set, threads)


def read_tuned(path: Path) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, _tile_config)


@cache
def tuned(instruction_set: str, threads: int) -> Mapping[Shape, CpuTileConfig]:
    """The configurations measured on this machine; empty where `sparsepack tune` never ran."""
    rows = read_tuned(tuned_path(instruction_set, threads))
    return {shape: _tile_config(row) for shape, row in rows.items()}


def _tile_config(row: Mapping[str, Any]) -> CpuTileConfig:
    span, tile = int(row["span"]), int(row["tile"])
    if not 1 <= span <= 16 or not 8 <= tile <= 256 or tile % 8:
        raise ValueError(f"span {span}, tile {tile}")
    return CpuTileConfig(span, tile)

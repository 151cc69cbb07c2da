"""How a zigzag matrix lies in memory: what the kernels leave open, and what was measured on this machine.

Where nothing was measured (`tune.py`), what did best on the machines that we had.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.runtime import tuning
from sparsepack.runtime.cpu.machine import cpu_info, instruction_set
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


def default_tile_config(shape: Shape) -> CpuTileConfig:
    """The configuration if nothing was measured."""
    return CpuTileConfig(span=min(-(-shape[0] // QUAD_ROWS), 4), tile=64)


def tile_config(shape: Shape, threads: int, block: str = "Q4_K") -> CpuTileConfig:
    """What suits a matrix: as measured on this machine, or else the default."""
    return tuned(instruction_set(), threads, block).get(shape) or default_tile_config(shape)


def tuning_path(instruction_set: str, threads: int, block: str = "Q4_K") -> Path:
    """The file that keeps what was measured on this machine for matrices of a type of superblocks."""
    return tuning.tuning_path("cpu", cpu_info(), instruction_set, threads, block=block)


def read_tuning(path: Path) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, tile_config_of)


@cache
def tuned(instruction_set: str, threads: int, block: str = "Q4_K") -> Mapping[Shape, CpuTileConfig]:
    """The configurations measured on this machine; empty where nothing was."""
    rows = read_tuning(tuning_path(instruction_set, threads, block))
    return {shape: tile_config_of(row) for shape, row in rows.items()}


def tile_config_of(row: Mapping[str, Any]) -> CpuTileConfig:
    """A configuration from a row of such a file. Raises `ValueError`, `KeyError` or `TypeError` where it is
    impossible."""
    span, tile = int(row["span"]), int(row["tile"])
    if not 1 <= span <= 16 or not 8 <= tile <= 256 or tile % 8:
        raise ValueError(f"span {span}, tile {tile}")
    return CpuTileConfig(span, tile)

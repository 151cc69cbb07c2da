"""How a matrix lies in memory: measured once for a machine, and remembered (SpQt, section 3.2: hardware profiling)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparsepack.runtime import tuning
from sparsepack.runtime.cpu.machine import cpu_info, instruction_set, native
from sparsepack.runtime.tuning import (
    ACTIVE,
    COPIES,
    ROTATION,
    Shape,
    copies_of,
    measure_shapes,
    random_blocks,
    row_of,
)

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


def tuning_path(instruction_set: str, threads: int) -> Path:
    """The file that keeps what was measured on this machine."""
    return tuning.tuning_path("cpu", cpu_info(), instruction_set, threads)


def read_tuning(path: Path) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, _tile_config)


@cache
def tuned(instruction_set: str, threads: int) -> Mapping[Shape, CpuTileConfig]:
    """The configurations measured on this machine; empty where `sparsepack tune` never ran."""
    rows = read_tuning(tuning_path(instruction_set, threads))
    return {shape: _tile_config(row) for shape, row in rows.items()}


def _tile_config(row: Mapping[str, Any]) -> CpuTileConfig:
    span, tile = int(row["span"]), int(row["tile"])
    if not 1 <= span <= 16 or not 8 <= tile <= 256 or tile % 8:
        raise ValueError(f"span {span}, tile {tile}")
    return CpuTileConfig(span, tile)


SPANS = (1, 2, 4, 8, 16)
TILES = (24, 48, 64, 96)
CALLS = 15
ROUNDS = 3


def measure(shapes: Iterable[Shape], threads: int) -> dict[str, Any]:
    """Time every configuration on every shape, keep the best, and return what was found as JSON-able values.

    Half of the columns are active, the weights come from memory, and collecting the columns is part of the time. What
    was measured before for other shapes stays. Raises `UserError` without kernels, `OutputError` where that cannot be
    kept.
    """
    name = instruction_set()
    path = tuning_path(name, threads)
    head = {"schema": SCHEMA, "cpu_info": cpu_info(), "instruction_set": name, "threads": threads}
    found = measure_shapes(shapes, path, head, read_tuning(path), lambda shape: _best(shape, threads))
    tuned.cache_clear()
    return found


def _best(shape: Shape, threads: int) -> dict[str, Any]:
    """The configuration with the least median time. They take turns: what disturbs the machine disturbs them all."""
    rows, columns = shape
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    threshold = x.abs().flatten().quantile(1 - ACTIVE).reshape(1)
    blocks = random_blocks(shape)
    copies = copies_of(blocks, ROTATION, COPIES)
    samples: dict[CpuTileConfig, list[int]] = {}
    for span in (s for s in SPANS if s == 1 or s <= -(-rows // QUAD_ROWS)):
        operations = native().Operations(instruction_set(), threads)
        matrices = [operations.load_zigzag(blocks, rows, span, TILES[0]) for _ in range(copies)]
        for _ in range(ROUNDS):
            for tile in TILES:
                taken = _times(matrices, tile, x, threshold, threads)
                samples.setdefault(CpuTileConfig(span, tile), []).extend(taken)
    times = {config: statistics.median(taken) for config, taken in samples.items()}
    best = min(times, key=lambda config: times[config])
    return row_of(shape, {"span": best.span, "tile": best.tile}, times.values(), times[best])


def _times(matrices: Sequence[Any], tile: int, x: torch.Tensor, threshold: torch.Tensor, threads: int) -> list[int]:
    """Nanoseconds of each call but the first."""
    for matrix in matrices:
        matrix.tile = tile
    calls = max(CALLS, len(matrices)) + 1
    times: list[int] = native().time_gemv(matrices, x, threshold, threads, calls, instruction_set())
    return times[1:]

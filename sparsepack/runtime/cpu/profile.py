"""Measure which geometry suits this machine, once, and remember it (SpQt, section 3.2: hardware profiling)."""

import hashlib
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparsepack.bench.machine import cpu_info
from sparsepack.files.atomic import write_json
from sparsepack.progress import progress
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.cpu.geometry import QUAD_ROWS, Geometry

Shape = tuple[int, int]
"""Rows and columns of a zigzag matrix."""

SCHEMA = 1
SHAPES: tuple[Shape, ...] = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (4096, 4096))
SHAPES += ((28672, 4096), (4096, 14336))
"""What is measured where no model is given: the sites of Llamas of 1 and 8 billion parameters."""

TILES = (24, 48, 64, 96)
ROTATION = 1 << 28
"""Bytes of copies that take turns, so that no cache serves weights."""
ROUNDS = 15
ACTIVE = 0.5


def profile_path(threads: int) -> Path:
    """Where the profile of this machine, at so many threads, is kept: below $XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(f"{cpu_info()}|{instruction_set()}|{threads}".encode()).hexdigest()[:12]
    return base / "sparsepack" / f"cpu-{key}.json"


@cache
def known(threads: int) -> Mapping[Shape, Geometry]:
    """The geometries measured on this machine; empty where `sparsepack profile` never ran.

    A file that is damaged or of another schema counts as none: it is a cache.
    """
    try:
        content = json.loads(profile_path(threads).read_text())
        if content["schema"] != SCHEMA:
            return {}
        return {(r["rows"], r["columns"]): Geometry(int(r["span"]), int(r["tile"])) for r in content["shapes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def measure(shapes: Iterable[Shape], threads: int) -> dict[str, Any]:
    """Time every geometry on every shape, keep the best ones, and return what was found as JSON-able rows.

    Half of the columns are active, the weights come from memory, and collecting the columns is part of the time. What
    was measured before for other shapes stays.
    """
    shapes = list(dict.fromkeys(shapes))
    path = profile_path(threads)
    rows = _rows(path)
    with progress("profile", len(shapes)) as advance:
        for shape in shapes:
            rows[shape] = _best(shape, threads)
            advance()
    result = {
        "schema": SCHEMA,
        "cpu_info": cpu_info(),
        "instruction_set": instruction_set(),
        "threads": threads,
        "shapes": list(rows.values()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    known.cache_clear()
    return {**result, "path": str(path), "measured": [rows[shape] for shape in shapes]}


def _rows(path: Path) -> dict[Shape, dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        return {(r["rows"], r["columns"]): r for r in content["shapes"]} if content["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _best(shape: Shape, threads: int) -> dict[str, Any]:
    """Medians of interleaved rounds: what disturbs the machine for a while disturbs all geometries."""
    rows, columns = shape
    candidates = [Geometry(span, tile) for span in _spans(rows) for tile in TILES]
    x, threshold = _input(columns)
    times: dict[Geometry, float] = {}
    for span in _spans(rows):
        matrices = _matrices(rows, columns, span, threads)
        for geometry in (g for g in candidates if g.span == span):
            times[geometry] = _median_time(matrices, geometry, x, threshold, threads)
    best = min(times, key=lambda geometry: times[geometry])
    needed = rows * columns * 9 / 16 * ACTIVE
    return {
        "rows": rows,
        "columns": columns,
        "span": best.span,
        "tile": best.tile,
        "microseconds": times[best] / 1e3,
        "bytes_per_second": needed / times[best] * 1e9,
        "slowest_microseconds": max(times.values()) / 1e3,
    }


def _spans(rows: int) -> list[int]:
    quads = -(-rows // QUAD_ROWS)
    return [span for span in (1, 2, 4, 8, 16) if span == 1 or span <= quads]


def _input(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    return x, x.abs().median().reshape(1)


def _matrices(rows: int, columns: int, span: int, threads: int) -> Sequence[Any]:
    """Random weights, as many copies as do not fit in any cache."""
    bands = -(-rows // 256)
    blocks = torch.randint(256, (bands, columns, 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[..., :4] = torch.tensor([0x66, 0x1E, 0x66, 0x1E])  # d and dmin: 0.00625
    operations = native().Operations(instruction_set(), threads)
    copies = max(2, -(-ROTATION // blocks.numel()))
    return [operations.load_zigzag(blocks, rows, span, 64) for _ in range(copies)]


def _median_time(
    matrices: Sequence[Any], geometry: Geometry, x: torch.Tensor, threshold: torch.Tensor, threads: int
) -> float:
    """Nanoseconds."""
    for matrix in matrices:
        matrix.tile = geometry.tile
    rounds = max(ROUNDS, len(matrices))
    times = native().time_gemv(matrices, x, threshold, threads, rounds, instruction_set())
    return float(statistics.median(times[1:]))

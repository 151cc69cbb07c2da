"""Measure which geometry suits this machine, once, and remember it (SpQt, section 3.2: hardware profiling)."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import OutputError
from sparsepack.files.atomic import write_json
from sparsepack.progress import progress
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.cpu.geometry import QUAD_ROWS, SCHEMA, Geometry, Shape, profile_path, profiled, read_profile
from sparsepack.runtime.cpu.machine import cpu_info

SHAPES: tuple[Shape, ...] = (
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
)
"""What is measured where no model is given: the sites of Llamas of 1 and 8 billion parameters."""

SPANS = (1, 2, 4, 8, 16)
TILES = (24, 48, 64, 96)
ROTATION = 1 << 28
"""Bytes of copies that take turns, so that no cache serves weights."""
COPIES = 4096
"""At most: matrices so small that this many fit into a cache are served by one when a model runs, too."""
CALLS = 15
ROUNDS = 3
ACTIVE = 0.5
BYTES_PER_WEIGHT = 9 / 16


def measure(shapes: Iterable[Shape], threads: int) -> dict[str, Any]:
    """Time every geometry on every shape, keep the best, and return what was found as JSON-able values.

    Half of the columns are active, the weights come from memory, and collecting the columns is part of the time. What
    was measured before for other shapes stays. Raises `UserError` without kernels, `OutputError` where the profile
    cannot be kept.
    """
    wanted = list(dict.fromkeys(shapes))
    name = instruction_set()
    path = profile_path(name, threads)
    rows = read_profile(path)
    _make_folder(path.parent)
    with progress("profile", len(wanted)) as advance:
        for shape in wanted:
            rows[shape] = _best(shape, threads)
            advance()
    head = {"schema": SCHEMA, "cpu_info": cpu_info(), "instruction_set": name, "threads": threads}
    write_json(path, {**head, "shapes": list(rows.values())})
    profiled.cache_clear()
    return {**head, "path": str(path), "shapes": [rows[shape] for shape in wanted]}


def _best(shape: Shape, threads: int) -> dict[str, Any]:
    """The geometry with the least median time. Geometries take turns: what disturbs the machine disturbs them all."""
    rows, columns = shape
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    threshold = x.abs().flatten().quantile(1 - ACTIVE).reshape(1)
    blocks = _random_blocks(rows, columns)
    copies = min(max(2, -(-ROTATION // blocks.numel())), COPIES)
    samples: dict[Geometry, list[int]] = {}
    for span in (s for s in SPANS if s == 1 or s <= -(-rows // QUAD_ROWS)):
        operations = native().Operations(instruction_set(), threads)
        matrices = [operations.load_zigzag(blocks, rows, span, TILES[0]) for _ in range(copies)]
        for _ in range(ROUNDS):
            for tile in TILES:
                taken = _times(matrices, tile, x, threshold, threads)
                samples.setdefault(Geometry(span, tile), []).extend(taken)
    times = {geometry: statistics.median(taken) for geometry, taken in samples.items()}
    best = min(times, key=lambda geometry: times[geometry])
    return {
        "rows": rows,
        "columns": columns,
        "span": best.span,
        "tile": best.tile,
        "microseconds": times[best] / 1e3,
        "slowest_microseconds": max(times.values()) / 1e3,
        "bytes_per_second": rows * columns * BYTES_PER_WEIGHT * ACTIVE / times[best] * 1e9,
    }


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder where a profile can be kept"
        ) from error


def _random_blocks(rows: int, columns: int) -> torch.Tensor:
    bands = -(-rows // 256)
    blocks = torch.randint(256, (bands, columns, 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[..., :4] = torch.tensor([0x66, 0x1E, 0x66, 0x1E])  # fp16 d and dmin, 0.00625
    return blocks


def _times(matrices: Sequence[Any], tile: int, x: torch.Tensor, threshold: torch.Tensor, threads: int) -> list[int]:
    """Nanoseconds of each call but the first."""
    for matrix in matrices:
        matrix.tile = tile
    calls = max(CALLS, len(matrices)) + 1
    times: list[int] = native().time_gemv(matrices, x, threshold, threads, calls, instruction_set())
    return times[1:]

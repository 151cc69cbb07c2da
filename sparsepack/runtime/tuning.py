"""What `sparsepack tune` finds out about a machine, shape by shape, and where that is kept (SpQt, section 3.2:
hardware profiling)."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import OutputError
from sparsepack.files.atomic import atomic_file, write_json
from sparsepack.files.lock import locked
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedExperts, PackedMatrix
from sparsepack.formats.orders.zigzag import superblock_bytes
from sparsepack.formats.packed import PackedModel
from sparsepack.process import cache_folder
from sparsepack.progress import progress

Shape = tuple[int, int]
"""A shape is the rows and columns of a zigzag matrix."""

SHAPES: tuple[Shape, ...] = (
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
)
"""These shapes are measured where no model is given: the sites of Llamas of 1 and 8 billion parameters."""
GATES: tuple[Shape, ...] = ((16384, 2048), (28672, 4096))
"""These shapes hold gate and up."""

SHARES = (0.16, 0.34, 0.52, 0.72, 0.9)
"""Of the inputs of a product with planes, those below the threshold of each level: 3.4 bits of a weight are read."""
PLANES_READ = 3.4

ROTATION = 1 << 28
"""The copies that take turns have this many bytes together, so that no cache serves weights."""
COPIES = 4096
"""The largest number of copies of a matrix that take turns. A matrix of which so many fit into a cache is served by a
cache when a model runs, too."""
ACTIVE = 0.5
BYTES_PER_WEIGHT = 9 / 16
_BYTES_PER_ROW = 1024
"""This many bytes are more than a row takes as it is kept."""


def tuning_path(kind: str, *machine: Any, block: str = "Q4_K") -> Path:
    """The file that keeps what was measured on a kind of machine for matrices of a type of superblocks."""
    of_block = () if block == "Q4_K" else (block,)
    key = hashlib.sha256("|".join(map(str, (*machine, *of_block))).encode()).hexdigest()[:12]
    return cache_folder() / f"{kind}-{key}.json"


def read_rows(path: Path, schema: int, config: Callable[[Mapping[str, Any]], object]) -> dict[Shape, dict[str, Any]]:
    """What was measured, by shape. A file that is missing, damaged or of another schema holds nothing.

    config -- makes of a row what it says; raises `ValueError`, `KeyError` or `TypeError` where that is impossible
    """
    try:
        content = json.loads(path.read_text())
        rows = content["shapes"] if content["schema"] == schema else []
        return {(int(row["rows"]), int(row["columns"])): row for row in rows if config(row)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


def measure_shapes(
    shapes: Iterable[Shape],
    path: Path,
    head: Mapping[str, Any],
    known: Mapping[Shape, dict[str, Any]],
    best: Callable[[Shape], dict[str, Any]],
) -> dict[str, Any]:
    """Measure every shape once, keep what was found beside what is `known`, and return it as JSON-able values.

    What other processes have kept meanwhile stays, too. Raises `OutputError` where nothing can be kept, before anything
    is measured.
    """
    unique = list(dict.fromkeys(shapes))
    rows: dict[Shape, dict[str, Any]] = {}
    check_capacity(path, len(known) + len(unique))
    before = read_rows(path, head["schema"], bool)
    with progress("tune", len(unique)) as advance:
        for shape in unique:
            rows[shape] = best(shape)
            advance()
    with locked(path, wait=True):
        there = read_rows(path, head["schema"], bool)
        meanwhile = {shape: row for shape, row in there.items() if repr(row) != repr(before.get(shape))}
        write_json(path, {**head, "shapes": list({**known, **meanwhile, **rows}.values())})
    return {**head, "path": str(path), "shapes": [rows[shape] for shape in unique]}


def row_of(
    shape: Shape, config: Mapping[str, int], nanoseconds: Iterable[float], best: float, block: str = "Q4_K"
) -> dict[str, Any]:
    """What is kept of a shape: the configuration that took the least time, of all that were measured."""
    rows, columns = shape
    read = PLANES_READ / 8 if BLOCKS[block].levels else BYTES_PER_WEIGHT * ACTIVE
    return {
        "rows": rows,
        "columns": columns,
        **config,
        "microseconds": best / 1e3,
        "slowest_microseconds": max(nanoseconds) / 1e3,
        "bytes_per_second": rows * columns * read / best * 1e9,
    }


def zigzag_matrices(packed: PackedModel) -> list[tuple[str, PackedMatrix | PackedExperts]]:
    """The matrices of a model whose layout is measured, with their sites."""
    return [
        (name, matrix)
        for layer in packed.layers
        for name, matrix in layer.matrices.items()
        if matrix.format.order == "zigzag"
    ]


def thresholds(x: torch.Tensor, block: str) -> torch.Tensor:
    """For inputs [..., columns] of a product: one threshold that half of them exceed, float32 [1], or of planes those
    of the levels of every column, the same for all: [levels, columns]."""
    size = x.abs().flatten()
    if not BLOCKS[block].levels:
        return size.quantile(1 - ACTIVE).reshape(1)
    return size.quantile(torch.tensor(SHARES, device=x.device))[:, None].repeat(1, x.shape[-1])


def random_blocks(shape: Shape, block: str = "Q4_K") -> torch.Tensor:
    """Superblocks of a matrix that has this shape: uint8 [bands, columns, bytes]."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    size = (-(-rows // 256), columns, superblock_bytes(block))
    blocks = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    if BLOCKS[block].levels:
        blocks[..., :4] = 130  # scales of about 2^-8
        return blocks
    blocks[..., :4] = torch.tensor([0x66, 0x1E, 0x66, 0x1E])  # fp16 d and dmin, 0.00625
    return blocks


def copies_of(size: int, rotation: int, most: int) -> int:
    """How many of a matrix of so many bytes take turns."""
    return min(max(2, -(-rotation // size)), most)


def check_capacity(path: Path, rows: int) -> None:
    """Make the folder, and write as much into it as will be kept: measuring takes minutes, and would be in vain.

    Raises `OutputError` where that is impossible.
    """
    remedy = "set XDG_CACHE_HOME to a folder where what was measured can be kept"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path.parent}: cannot be made ({error.strerror}); {remedy}") from error
    try:
        with atomic_file(path.with_suffix(".room"), overwrite=True) as temporary:
            temporary.write_bytes(b" " * (rows + 1) * _BYTES_PER_ROW)
    except OutputError as error:
        raise OutputError(f"{error}; {remedy}") from error
    path.with_suffix(".room").unlink(missing_ok=True)

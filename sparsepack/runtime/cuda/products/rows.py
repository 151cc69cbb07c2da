"""Matrices stored by rows on the GPU, the output matrix and the embedding: loading, products, and single rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsepack.formats.blocks.q4_k import BLOCK_BYTES, scales_and_mins
from sparsepack.formats.blocks.q8_0 import BLOCK_BYTES as Q8_0_BYTES
from sparsepack.formats.blocks.superblock import BLOCK
from sparsepack.formats.blocks.table import stored_bytes
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.runtime.cuda.driver.device import deepest_pipeline, shared_limit
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.driver.memory import Place, on_card
from sparsepack.runtime.cuda.products.zigzag import fp16_scale, largest_ends

TYPES = {"F32": 0, "F16": 1, "BF16": 2, "Q4_K": 3, "Q6_K": 4, "Q8_0": 5}
"""The types have the numbers that `kernels/products/rows.cuh` gives them."""
MOST_VECTORS = 8
"""One launch takes at most this many vectors."""

TILE_ROWS = {"F32": 4, "F16": 4, "BF16": 4, "Q4_K": 8, "Q6_K": 8, "Q8_0": 8}
TILE_COLUMNS = {"F32": 128, "F16": 256, "BF16": 256, "Q4_K": 256, "Q6_K": 256, "Q8_0": 256}
TILE_BYTES = {"F32": 2048, "F16": 2048, "BF16": 2048, "Q4_K": 1152, "Q6_K": 1680, "Q8_0": 2176}
WARPS = 16
STAGES = (4, 3, 2)
"""A warp's pipeline has the first of these numbers of stages with which shared memory has room for the whole of x."""
REPACKED_AT_ONCE = 1 << 23
"""This many bytes of a matrix are repacked at a time; temporaries take about fifteen times as much."""
SCRATCH_WEIGHTS = 1 << 24
"""This many weights are decoded at a time for products with many vectors."""
FEW_VECTORS = 16
"""For up to this many vectors `matmul` reads the matrix once for every eight."""


@dataclass(frozen=True, eq=False)
class RowsMatrix:
    """A matrix as `kernels/products/rows.cuh` draws it.

    data      -- uint8; tiles of 8 rows (missing ones are zeros), or rows of floats padded to 16 bytes
    type      -- "Q8_0", "Q6_K", "Q4_K", "F16", "BF16" or "F32"
    row_bytes -- of a row of floats, padding included; 0 for the other types
    """

    data: Tensor
    type: str
    rows: int
    columns: int
    row_bytes: int


@dataclass(frozen=True, eq=False)
class RowsFp16:
    """A matrix of superblocks that products in float16 read, too.

    fp16_scale -- power of two that brings the largest weight near the largest float16
    """

    matrix: RowsMatrix
    fp16_scale: float


def load_rows_fp16(matrix: PackedMatrix, device: torch.device | str = "cuda", *, place: Place = on_card) -> RowsFp16:
    """`load_rows` of a matrix in Q4_K."""
    step = max(REPACKED_AT_ONCE // max(matrix.blocks.shape[1], 1), 1)
    parts = (part.view(len(part), -1, BLOCK_BYTES) for part in torch.split(matrix.blocks, step))
    d, dmin = (max(ends) for ends in zip(*(largest_ends(part.to(device)) for part in parts), strict=True))
    return RowsFp16(load_rows(matrix, device, place=place), fp16_scale(d, dmin))


def load_rows(matrix: PackedMatrix, device: torch.device | str = "cuda", *, place: Place = on_card) -> RowsMatrix:
    """Repack a stored matrix on a device, some rows at a time. Takes its stored size there, and waits for the device.

    place -- where the matrix shall lie: products read it there

    Raises `ValueError` for another type, such as that of a zigzag matrix.
    """
    if matrix.format.order != "rows" or matrix.format.block not in TYPES:
        raise ValueError(f"matrix of type {matrix.format}, expected one stored by rows: {', '.join(TYPES)}")
    rows, row_bytes = matrix.blocks.shape
    step = max(REPACKED_AT_ONCE // max(row_bytes, 1) // 8, 1) * 8  # whole tiles
    parts = [matrix.blocks[start : start + step] for start in range(0, rows, step)]
    if repack := _REPACKED.get(matrix.format.block):
        padded_bytes = 0
        across = -(-matrix.columns // TILE_COLUMNS[matrix.format.block])
        tile_bytes = stored_bytes(matrix.format.block, TILE_COLUMNS[matrix.format.block])  # of a row, as stored
        data = torch.empty(-(-rows // 8), across * TILE_BYTES[matrix.format.block], dtype=torch.uint8, device=device)
        for number, part in enumerate(parts):
            part = pad(part.to(device), (0, across * tile_bytes - row_bytes, 0, -len(part) % 8))
            tiles = repack(part.view(len(part), across, tile_bytes))
            data[number * step // 8 :][: len(tiles)] = tiles.view(len(tiles), -1)
    else:
        padded_bytes = -(-row_bytes // 16) * 16
        data = torch.empty(rows, padded_bytes, dtype=torch.uint8, device=device)
        data[:, row_bytes:] = 0
        for number, part in enumerate(parts):
            data[number * step :][: len(part), :row_bytes] = part.to(device)
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()  # kernels read weights before they wait for what is ahead
    return RowsMatrix(_placed(data.view(-1), place), matrix.format.block, matrix.rows, matrix.columns, padded_bytes)


def _placed(data: Tensor, place: Place) -> Tensor:
    there = place(data)
    if there is not data:
        torch.cuda.current_stream(data.device).synchronize()
    return there


def _tiles_of_q8_0(blocks: Tensor) -> Tensor:
    """uint8 [8 n, tiles, 8 blocks of 34] -> [n, tiles, 2176]."""
    rows, across, _ = blocks.shape
    blocks = blocks.view(rows, across, 8, Q8_0_BYTES)
    columns = (blocks[..., 2:] ^ 128).reshape(rows, across, 16, 4, 4)
    planes = _by_tile(columns).permute(0, 3, 5, 1, 4, 2, 6)  # [n, tiles, 4, halves, 16, rows, 4]
    factors = _by_tile(blocks[..., :2]).permute(0, 3, 1, 4, 2, 5)  # [n, tiles, halves, 8, rows, 2]
    return torch.cat([part.flatten(2) for part in (planes, factors)], dim=2)


def _tiles_of_q6_k(blocks: Tensor) -> Tensor:
    """uint8 [8 n, superblocks, 210] -> [n, superblocks, 1680]."""
    rows, across, _ = blocks.shape
    low = blocks[..., :128].view(rows, across, 2, 1, 64)
    high = blocks[..., 128:192].view(rows, across, 2, 1, 32)
    q = torch.cat([low & 15, low >> 4], dim=3).view(rows, across, BLOCK)
    q |= torch.cat([high << 4, high << 2, high, high >> 2], dim=3).view(rows, across, BLOCK) & 48
    fields = q.view(rows, across, 16, 4, 4).int()
    words = fields[..., 0] | fields[..., 1] << 6 | fields[..., 2] << 12 | fields[..., 3] << 18
    parts = words.view(torch.uint8).view(rows, across, 16, 4, 4)
    parts[..., :3, 3] = parts[..., 3, :3]  # the fourth word into the free bytes of the others
    planes = _by_tile(parts[..., :3, :]).permute(0, 3, 5, 1, 4, 2, 6)  # [n, superblocks, 3, halves, 16, rows, 4]
    scales = _by_tile(blocks[..., 192:208] ^ 128).permute(0, 3, 1, 4, 2)  # [n, superblocks, halves, 16, rows]
    factors = _by_tile(blocks[..., 208:210]).permute(0, 3, 1, 2, 4)  # [n, superblocks, halves, rows, 2]
    return torch.cat([part.flatten(2) for part in (planes, scales, factors)], dim=2)


def _tiles_of_q4_k(blocks: Tensor) -> Tensor:
    """uint8 [8 n, superblocks, 144] -> [n, superblocks, 1152]."""
    rows, across, _ = blocks.shape
    scale, minimum = scales_and_mins(blocks)  # [rows, superblocks, 8]
    pairs = blocks[..., 16:].view(rows, across, 4, 1, 32)
    q = torch.cat([pairs & 15, pairs >> 4], dim=3).view(rows, across, 16, 2, 4, 2)
    parts = q[..., 0] | q[..., 1] << 4  # [rows, superblocks, 16, words, 4]
    planes = _by_tile(parts).permute(0, 3, 5, 1, 4, 2, 6)  # [n, superblocks, words, halves, 16, rows, 4]
    numbers = _by_tile(scale | minimum >> 4 << 6).permute(0, 3, 1, 4, 2)  # [n, superblocks, halves, 8, rows]
    low = _by_tile(minimum & 15).permute(0, 3, 1, 4, 2)
    low = low[..., :2] | low[..., 2:] << 4
    factors = _by_tile(blocks[..., :4]).permute(0, 3, 1, 2, 4)  # [n, superblocks, halves, rows, 4]
    return torch.cat([part.flatten(2) for part in (planes, numbers, low, factors)], dim=2)


def _by_tile(x: Tensor) -> Tensor:
    """[8 n, ...] -> [n, halves, 4 rows, ...]."""
    return x.reshape(-1, 2, 4, *x.shape[1:])


_REPACKED = {"Q4_K": _tiles_of_q4_k, "Q6_K": _tiles_of_q6_k, "Q8_0": _tiles_of_q8_0}
"""These types are repacked into tiles; of the others, floats, lanes read rows as they are stored."""


def product(
    matrix: RowsMatrix,
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    cap: float = 0.0,
    candidates: Tensor | None = None,
) -> None:
    """Put y = W xn on the current stream, for one to eight vectors; xn = x, or RMSNorm(x) with a `norm`.

    x          -- float32 [vectors, columns], contiguous
    y          -- float32 [vectors, rows], contiguous
    norm, eps  -- weight of the RMSNorm, float32 [columns], and what it adds to the mean square
    cap        -- of y, as `models.activations.soft_capped` takes it
    candidates -- what `sampling.pick_likeliest` chooses from, as `new_candidates` makes it

    The same bits every run; and where x fits in shared memory (on an H100 4096 columns of eight vectors), whatever the
    number of vectors. For types of blocks, terms fade to 0 below 2^-64 and xn is infinite from 2^64 on.

    Raises `ValueError` for shapes that do not fit.
    """
    _check("x", x, (len(x), matrix.columns))
    _check("y", y, (len(x), matrix.rows))
    if norm is not None:
        _check("norm", norm, (matrix.columns,))
    if not 1 <= len(x) <= MOST_VECTORS:
        raise ValueError(f"{len(x)} vectors, expected 1 to {MOST_VECTORS}")
    device = matrix.data.device
    grid = blocks(matrix)
    if candidates is not None and candidates.shape != (len(x), grid):
        raise ValueError(f"candidates {list(candidates.shape)}, expected {[len(x), grid]}; make them by new_candidates")
    plan = _plan(matrix.type, matrix.columns, len(x), device)
    defines = (f"TYPE={TYPES[matrix.type]}", f"BATCH={len(x)}", f"STAGES={plan.stages}", f"CAPPED={int(cap > 0)}")
    launch(
        kernel("rows_product", "rows_product", defines, device.index or 0),
        (grid,),
        WARPS * 32,
        *(matrix.data, matrix.rows, matrix.columns, matrix.row_bytes),
        *(x, norm, float(eps), plan.piece, y, float(cap), candidates),
        shared=plan.shared,
    )


def blocks(matrix: RowsMatrix) -> int:
    """How many blocks `product` runs: one for each multiprocessor, if there are as many tiles in a column."""
    return min(multiprocessors(matrix.data.device), -(-matrix.rows // TILE_ROWS[matrix.type]))


def new_candidates(matrix: RowsMatrix, vectors: int) -> Tensor:
    """Room for the best row of every block and vector: int64 [vectors, blocks], for `product` and
    `sampling.pick_likeliest`."""
    return torch.zeros(vectors, blocks(matrix), dtype=torch.int64, device=matrix.data.device)


def matmul(matrix: RowsMatrix, x: Tensor) -> Tensor:
    """Y = X W^T for any number of vectors: float32 [S, columns] -> float32 [S, rows].

    From 17 on the weights are decoded, a part of the rows at a time, and multiplied in float32 by cuBLAS.
    """
    x = x.contiguous()
    y = torch.empty(len(x), matrix.rows, device=x.device)
    if len(x) <= FEW_VECTORS:
        for first in range(0, len(x), MOST_VECTORS):
            product(matrix, x[first : first + MOST_VECTORS], y[first : first + MOST_VECTORS])
        return y
    step = max(SCRATCH_WEIGHTS // matrix.columns, 1)
    scratch = torch.empty(min(step, matrix.rows), matrix.columns, device=x.device)
    with _exact_float32():
        for first in range(0, matrix.rows, step):
            rows = scratch[: matrix.rows - first]
            _decode(matrix, None, first, rows)
            y[:, first : first + len(rows)] = torch.mm(x, rows.t())
    return y


def decode(matrix: RowsMatrix, first: int, out: Tensor, scale: float = 1.0) -> None:
    """Put rows of a matrix from `first` on, times `scale`, on the current stream: out float32 [rows, columns]."""
    _check("out", out, (len(out), matrix.columns))
    _decode(matrix, None, first, out, scale)


def embed(matrix: RowsMatrix, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Put rows of a matrix, times `scale`, on the current stream: ids int32 [S] on the device -> out float32 [S,
    columns].

    The bits are those of `Block.decode`, times `scale` in float32. An id that is no row gives
    NaN.
    """
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids of {ids.dtype}, stride {ids.stride()}: expected contiguous torch.int32")
    _check("out", out, (len(ids), matrix.columns))
    _decode(matrix, ids, 0, out, scale)


def _decode(matrix: RowsMatrix, ids: Tensor | None, first: int, out: Tensor, scale: float = 1.0) -> None:
    if not out.numel():
        return
    launch(
        kernel("rows_decode", "rows_decode", (f"TYPE={TYPES[matrix.type]}",), matrix.data.device.index or 0),
        (len(out), -(-matrix.columns // 1024)),
        256,
        *(matrix.data, matrix.rows, matrix.columns, matrix.row_bytes, ids, first, float(scale), out),
    )


@dataclass(frozen=True)
class _Plan:
    """stages -- tiles of a warp's ring
    piece  -- tiles of a row whose part of x lies in shared memory at once
    shared -- bytes
    """

    stages: int
    piece: int
    shared: int


@cache
def _plan(type: str, columns: int, vectors: int, device: torch.device) -> _Plan:
    """The deepest rings that leave room for the whole of x (`kernels/products/rows_product.cu`); else the shallowest,
    and x in pieces."""
    tiles = -(-columns // TILE_COLUMNS[type])
    # float32 x of a tile; sums of 16 columns for the types that have sub-blocks; norms or candidates of the warps
    x = 4 * vectors * (TILE_COLUMNS[type] + (16 if type in _REPACKED else 0))
    few = 8 * vectors * WARPS

    def shared(stages: int, piece: int) -> int:
        return WARPS * stages * TILE_BYTES[type] + few + piece * x

    stages = deepest_pipeline(STAGES, lambda n: shared(n, tiles), device)
    piece = min(tiles, (shared_limit(device) - shared(stages, 0)) // x)
    return _Plan(stages, piece, shared(stages, piece))


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"{name}: {x.dtype} {list(x.shape)}, stride {x.stride()}; expected contiguous float32 {list(shape)}"
        )
    if shape[-1] % 4 == 0 and x.data_ptr() % 16:
        raise ValueError(f"{name}: begins at address {x.data_ptr():#x}, expected a multiple of 16; copy it")


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Compute products of float32 without TF32 while the context lasts."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

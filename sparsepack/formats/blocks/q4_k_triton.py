"""Q4_K's encoder as one Triton kernel: each weight is read once and each superblock's 144 bytes are written once.

It reads a matrix [rows, columns] of any strides, of float32, float16 or bfloat16. A superblock is 256 rows of one
column, as in zigzag; superblocks along rows, as q4_k.encode has them, are the same thing seen through a transpose.

              column 0 .. 7        8 .. 15
            +------------------+------------------+---
    row   0 | y[:, :, 0]       |                  |        a program's tile y [8 columns, 32 rows, 8 sub-blocks]
         32 | y[:, :, 1]       |                  |        stays in registers; rows and columns beyond the matrix
          : |  :               |                  |        read as zeros, columns are not written
        224 | y[:, :, 7]       |                  |
            +------------------+------------------+---
    row 256 | band 1           |                  |

    out       band 0: column 0 .. columns - 1, then band 1: ...       144 bytes each, laid out as in q4_k.py

Launch: one axis of bands * ceil(columns / 8) programs of 2 warps, the tiles of a band one after the other. Adjacent
columns (zigzag) go to adjacent threads; of adjacent rows (a transpose) a thread loads 16 bytes at a time.

The arithmetic is that of `q4_k.encode_columns` on a CPU, operation by operation: sums over a sub-block are exact,
sums over sub-blocks are taken in halves, and what torch fuses into one rounding (addcmul, add with alpha) is `tl.fma`
here while the compiler may fuse nothing else. The bytes are therefore the CPU's.
"""

# Triton has no type stubs, and its functions take tensors and compile-time constants without saying which.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, warn-return-any=False

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepack.formats.blocks import q4_k, superblock

TILE = 8  # superblocks per program: 16 adjacent bytes of bfloat16 in each row that a zigzag tile reads
WARPS = 2

SUB = tl.constexpr(q4_k.SUB)
SUBS = tl.constexpr(q4_k.SUBS)
BLOCK = tl.constexpr(superblock.BLOCK)
BLOCK_BYTES = tl.constexpr(q4_k.BLOCK_BYTES)
STEPS = tl.constexpr(float(q4_k.STEPS))
GRID_COUNT = tl.constexpr(len(q4_k.GRIDS))
FIRST_BONUS = tl.constexpr(q4_k.FIRST_BONUS)
HIGHEST = tl.constexpr(q4_k.HIGHEST)
LOWEST = tl.constexpr(q4_k.LOWEST)
FP16_MAX = tl.constexpr(superblock.FP16_MAX)
TINY = tl.constexpr(superblock.TINY)
# Added and subtracted, it leaves the nearest integer (ties to even, as torch.round) of any |x| < 2**22.
ROUNDER = tl.constexpr(1.5 * 2**23)


def encode(weight: Tensor) -> Tensor:
    """Zigzag superblocks of a matrix [rows, columns]: uint8 [bands * columns, 144] on its device.

    For callers that checked for finite weights. Oracle: `q4_k.encode_columns`.
    """
    rows, columns = weight.shape
    bands, tiles = triton.cdiv(rows, superblock.BLOCK), triton.cdiv(columns, TILE)
    blocks = torch.empty(bands * columns, q4_k.BLOCK_BYTES, dtype=torch.uint8, device=weight.device)
    if blocks.numel():
        with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
            _encode[(bands * tiles,)](
                *(weight, blocks, _grids(weight.device), rows, columns, tiles, *weight.stride()),
                TRANSPOSED=weight.stride(0) == 1,
                WHOLE=weight.stride(0) == 1 and rows % superblock.BLOCK == 0,
                TILE=TILE,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
    return blocks


@cache
def _grids(device: torch.device) -> Tensor:
    """GRIDS as float32 [grids, 2], levels per step of y and phase: a table keeps the loop over them a loop."""
    return torch.tensor([(levels / q4_k.STEPS, phase) for levels, phase in q4_k.GRIDS], device=device)


# Unspecialised values save compilations. And a row stride known to be a multiple of 16 would make Triton give a thread
# several adjacent columns: the rows of a sub-block then spread over the warps, and registers spill.
@triton.jit(do_not_specialize=["rows", "columns", "tiles", "row_stride"])
def _encode(
    weights,
    blocks,
    grids,
    rows,
    columns,
    tiles,
    row_stride,
    column_stride,
    TRANSPOSED: tl.constexpr,  # row_stride is 1
    WHOLE: tl.constexpr,  # and 256 divides rows, without which loads are narrower
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    band = (program // tiles).to(tl.int64)
    column = program % tiles * TILE + tl.arange(0, TILE)
    # Band and column have 64 bits: a matrix may have more than 2**31 elements.
    row = band * BLOCK + tl.arange(0, SUBS)[None, None, :] * SUB + tl.arange(0, SUB)[None, :, None]
    at = column[:, None, None].to(tl.int64) * column_stride + row * (1 if TRANSPOSED else row_stride)
    held = (column < columns)[:, None, None]
    x = tl.load(weights + at, mask=held if WHOLE else held & (row < rows), other=0.0).to(tl.float32)
    d, dmin, scale, minimum, q = _quantise(x, grids, TILE)
    out = blocks + (band * columns + column) * BLOCK_BYTES  # [TILE]
    _pack(out, column < columns, d, dmin, scale, minimum, q, TILE)


# Columns of a block are few where a program has all rows of a band: [columns, 32, 8] stay in registers.
COLUMNS, FEEDBACK_WARPS = 32, 4


def quantise_block(block: Tensor, factor: Tensor, first: int, blocks: Tensor) -> Tensor:
    """Quantise a block of columns with error feedback, contiguous float32 [columns, rows], in place; return their
    errors, float32 [columns, rows], as `reconstruction` takes them off the columns behind.

    factor -- U, of all columns of the matrix
    first  -- the number of the block's first column in the matrix
    blocks -- uint8 [columns of the block, bands, 144], to be written
    """
    columns, rows = block.shape
    errors = torch.empty_like(block)
    of_block = factor[first : first + columns, first : first + columns].contiguous()
    with torch.cuda.device(block.device) if block.is_cuda else nullcontext():
        _quantise_block[(blocks.shape[1],)](
            *(block, errors, of_block, blocks, _grids(block.device), columns, rows, blocks.shape[1]),
            COLUMNS=max(triton.next_power_of_2(columns), 2),
            num_warps=FEEDBACK_WARPS,
            enable_fp_fusion=False,
        )
    return errors


@triton.jit(do_not_specialize=["columns", "rows", "bands"])
def _quantise_block(block, errors, factor, blocks, grids, columns, rows, bands, COLUMNS: tl.constexpr):
    band = tl.program_id(0)
    row = band * BLOCK + tl.arange(0, SUBS)[None, None, :] * SUB + tl.arange(0, SUB)[None, :, None]
    number = tl.arange(0, COLUMNS)[:, None, None]
    places = number.to(tl.int64) * rows + row
    inside = (number < columns) & (row < rows)
    tile = tl.load(block + places, mask=inside, other=0.0)  # [COLUMNS, 32, 8]
    one = tl.arange(0, 1)
    for at in range(columns):
        x = tl.sum(tl.where(number == at, tile, 0.0), 0)[None, :, :]
        d, dmin, scale, minimum, q = _quantise(x, grids, 1)
        out = blocks + (tl.cast(at, tl.int64) * bands + band + one) * BLOCK_BYTES
        _pack(out, one == 0, d, dmin, scale, minimum, q, 1)
        after = tl.floor(q) * (scale * d[:, None])[:, None, :] - (minimum * dmin[:, None])[:, None, :]
        after = tl.where(row < rows, after, 0.0)
        error = tl.div_rn(x - after, tl.load(factor + at * (columns + 1)))
        later = tl.load(factor + at * columns + number, mask=(number > at) & (number < columns), other=0.0)
        tile = tl.where(number == at, after, tile - later * error)
        tl.store(errors + tl.cast(at, tl.int64) * rows + row, error, mask=row < rows)
    tl.store(block + places, tile, mask=inside)


@triton.jit
def _quantise(x, grids, TILE: tl.constexpr):
    """d, dmin [TILE], scale, minimum [TILE, 8] and nibbles, plus a half, to be truncated [TILE, 32, 8]."""
    y = tl.minimum(tl.maximum(x, LOWEST), HIGHEST)

    low = tl.minimum(tl.min(y, 1), 0.0)  # [TILE, 8]
    y -= low[:, None, :]
    unit = tl.div_rn(tl.max(y, 1), STEPS)
    y = _round(y * _reciprocal(unit)[:, None, :])
    total = tl.sum(y, 1)

    sq, sqq, sqy = _best_grid(y, total, low, grids)
    fit = _fit(total, sq, sqq, sqy, unit, low)
    d, dmin = _shared_scales(fit, TILE)
    scale, minimum, loss = _on_grid(fit, d[:, None], dmin[:, None])

    q = tl.floor(_nibbles(y, scale * d[:, None], minimum * dmin[:, None], unit, low))
    fit = _fit(total, tl.sum(q, 1), tl.sum(q * q, 1), tl.sum(q * y, 1), unit, low)
    kept = _loss(fit, scale * d[:, None], tl.fma(minimum, dmin[:, None], low))
    other_scale, other_minimum, loss = _on_grid(fit, d[:, None], dmin[:, None])
    better = loss < kept
    scale = tl.where(better, other_scale, scale)
    minimum = tl.where(better, other_minimum, minimum)
    d, dmin = _refined(fit, scale, minimum, d, dmin, _sum_subs(tl.where(better, loss, kept), TILE), TILE)
    return d, dmin, scale, minimum, _nibbles(y, scale * d[:, None], minimum * dmin[:, None], unit, low)


@triton.jit
def _best_grid(y, total, low, grids):
    """Sums of q, q q and q y of the grid with the least squared error in each sub-block."""
    best = tl.full(total.shape, -float("inf"), tl.float32)
    best_q, best_qq, best_qy = tl.zeros_like(total), tl.zeros_like(total), tl.zeros_like(total)
    of_total = tl.div_rn(total * total, 1.0 * SUB)
    for grid in range(GRID_COUNT):
        q = tl.floor(tl.fma(y, tl.load(grids + 2 * grid), tl.load(grids + 2 * grid + 1)))
        sq, sqq, sqy = tl.sum(q, 1), tl.sum(q * q, 1), tl.sum(q * y, 1)
        covariance = tl.fma(sq * (-1 / SUB), total, sqy)
        slope = tl.div_rn(covariance, tl.maximum(tl.fma(sq * (-1 / SUB), sq, sqq), TINY))
        held = (slope * sq < total) & (low == 0)
        without_min = tl.div_rn(sqy * sqy, tl.maximum(sqq, 1.0)) - of_total
        gain = tl.where(held, without_min, slope * covariance)
        gain = tl.where(grid == 0, gain * FIRST_BONUS, gain)
        better = gain > best
        best = tl.where(better, gain, best)
        best_q = tl.where(better, sq, best_q)
        best_qq = tl.where(better, sqq, best_qq)
        best_qy = tl.where(better, sqy, best_qy)
    return best_q, best_qq, best_qy


@triton.jit
def _fit(total, q, qq, sqy, unit, low):
    """(low, y, q, qy, qq, variance, s, offset): q4_k._Fit, all [TILE, 8]."""
    y, qy = total * unit, sqy * unit
    variance = tl.fma(q * (-1 / SUB), q, qq)
    s = tl.fma(q * (-1 / SUB), y, qy) * _reciprocal(variance)
    offset = (s * q - y) * (1 / SUB)
    same = (variance <= 0) & (q > 0) & (low == 0)
    s = tl.where(same, tl.div_rn(qy, tl.maximum(qq, 1.0)), s)
    return low, y, q, qy, qq, variance, s, tl.where(same, low, offset)


@triton.jit
def _loss(fit, s, offset):
    """Squared error of y = s q - offset above that of the fit, for the same q."""
    _, _, q, _, _, variance, fit_s, fit_offset = fit
    ds = s - fit_s
    mean = tl.fma(ds * (-1 / SUB), q, offset - fit_offset)
    return ds * ds * variance + mean * mean * SUB


@triton.jit
def _shared_scales(fit, TILE: tl.constexpr):
    """d and dmin [TILE]: the best of four pairs."""
    low, _, q, qy, qq, _, s, offset = fit
    m = offset - low
    without_min = tl.div_rn(tl.fma(low, q, qy), tl.maximum(qq, 1.0))
    most_s = tl.maximum(tl.max(tl.where(m < 0, without_min, s), 1), 0.0)
    most_m = tl.maximum(tl.max(m, 1), 0.0)
    small_d, small_dmin = _fp16(tl.div_rn(most_s, 63.0)), _fp16(tl.div_rn(most_m, 63.0))
    large_d = tl.maximum(_fp16(tl.div_rn(most_s, 61.0)), _next_fp16(small_d))
    large_dmin = tl.maximum(_fp16(tl.div_rn(most_m, 61.0)), _next_fp16(small_dmin))
    best_d, best_dmin = small_d, small_dmin
    least = tl.full(small_d.shape, float("inf"), tl.float32)
    for pair in range(4):
        d = tl.where(pair % 2 == 0, small_d, large_d)
        dmin = tl.where(pair < 2, small_dmin, large_dmin)
        loss = _sum_subs(_on_grid(fit, d[:, None], dmin[:, None])[2], TILE)
        better = loss < least
        best_d = tl.where(better, d, best_d)
        best_dmin = tl.where(better, dmin, best_dmin)
        least = tl.where(better, loss, least)
    return best_d, best_dmin


@triton.jit
def _on_grid(fit, d, dmin):
    """Six-bit scales and mins that suit these q best, and the loss of each sub-block: [TILE, 8] each."""
    low, _, q, qy, qq, _, _, offset = fit
    minimum = _clamp(tl.floor((offset - low) * _reciprocal(dmin)), 62.0)
    per_scale = _reciprocal(qq * d)
    at = tl.fma(minimum, dmin, low)
    scale = _round(_clamp(tl.fma(at, q, qy) * per_scale, 63.0))
    loss = _loss(fit, scale * d, at)
    at = tl.fma(minimum + 1, dmin, low)
    other_scale = _round(_clamp(tl.fma(at, q, qy) * per_scale, 63.0))
    other_loss = _loss(fit, other_scale * d, at)
    better = other_loss < loss
    return (
        tl.where(better, other_scale, scale),
        tl.where(better, minimum + 1, minimum),
        tl.where(better, other_loss, loss),
    )


@triton.jit
def _refined(fit, scale, minimum, d, dmin, loss, TILE: tl.constexpr):
    """d and dmin [TILE] by least squares with all else held; the old pair where that is no better."""
    low, y, q, qy, qq, _, _, _ = fit
    a = tl.maximum(_sum_subs(scale * scale * qq, TILE), 1.0)
    b = _sum_subs(scale * minimum * q, TILE)
    c = tl.maximum(_sum_subs(minimum * minimum, TILE) * SUB, 1.0)
    u = _sum_subs(tl.fma(low, q, qy) * scale, TILE)
    v = _sum_subs((low * SUB + y) * minimum, TILE)
    determinant = a * c - b * b
    solvable = determinant > a * 1e-6 * c
    new_d = _fp16(tl.maximum(tl.where(solvable, tl.div_rn(u * c - v * b, determinant), d), 0.0))
    new_dmin = _fp16(tl.maximum(tl.where(solvable, tl.div_rn(u * b - v * a, determinant), dmin), 0.0))
    new_loss = _loss(fit, scale * new_d[:, None], tl.fma(minimum, new_dmin[:, None], low))
    better = _sum_subs(new_loss, TILE) < loss
    return tl.where(better, new_d, d), tl.where(better, new_dmin, dmin)


@triton.jit
def _nibbles(y, s, m, unit, low):
    """Nearest nibbles given scales s and mins m [TILE, 8]: [TILE, 32, 8], plus a half, to be truncated."""
    inverse = _reciprocal(s)
    offset = (m + low) * inverse + 0.5
    return _clamp(tl.fma(y, (unit * inverse)[:, None, :], offset[:, None, :]), 15.5)


@triton.jit
def _pack(out, held, d, dmin, scale, minimum, nibbles, TILE: tl.constexpr):
    """Write the superblocks at the pointers out [TILE] where `held`."""
    d = _fp16_bits(tl.where(tl.max(scale, 1) > 0, d, 0.0))
    dmin = _fp16_bits(tl.where(tl.max(minimum, 1) > 0, dmin, 0.0))
    # As one word: ptxas 12.8 takes storing the low byte of a float16's bits for a conversion of its value.
    tl.store(out.to(tl.pointer_type(tl.uint32)), d | (dmin << 16), mask=held)
    scale, high_scale = _halves(scale.to(tl.uint8), TILE, SUBS // 2)
    minimum, high_minimum = _halves(minimum.to(tl.uint8), TILE, SUBS // 2)
    at = out[:, None] + tl.arange(0, SUBS // 2)[None, :]
    held = held[:, None]
    tl.store(at + 4, scale | (high_scale >> 4 << 6), mask=held)
    tl.store(at + 8, minimum | (high_minimum >> 4 << 6), mask=held)
    tl.store(at + 12, (high_scale & 15) | (high_minimum << 4), mask=held)
    even, odd = tl.split(tl.reshape(nibbles.to(tl.uint8), [TILE, SUB, SUBS // 2, 2]))
    half: tl.constexpr = BLOCK // 2
    pairs = tl.reshape(tl.permute(even | (odd << 4), (0, 2, 1)), [TILE, half])
    tl.store(out[:, None] + 16 + tl.arange(0, half)[None, :], pairs, mask=held)


@triton.jit
def _sum_subs(x, TILE: tl.constexpr):
    """[TILE, 8] -> [TILE], in halves as superblock.sum_subs: tl.sum's order would follow from how x was loaded."""
    low, high = _halves(x, TILE, 4)
    low, high = _halves(low + high, TILE, 2)
    low, high = tl.split(low + high)
    return low + high


@triton.jit
def _halves(x, TILE: tl.constexpr, HALF: tl.constexpr):
    """[TILE, 2 HALF] -> [TILE, HALF] twice."""
    return tl.split(tl.permute(tl.reshape(x, [TILE, 2, HALF]), (0, 2, 1)))


@triton.jit
def _reciprocal(x):
    """1 / x, and 0 where x is too small to divide by."""
    return tl.where(x > TINY, tl.div_rn(1.0, x), 0.0)


@triton.jit
def _round(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _clamp(x, most):
    return tl.minimum(tl.maximum(x, 0.0), most)


@triton.jit
def _fp16(x):
    """`x`, not negative, as float32 of the nearest finite float16."""
    return tl.minimum(x, FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def _fp16_bits(x):
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _next_fp16(x):
    """The float16 just above `x`, itself a float16 that is not negative, as float32."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True) + 1
    return tl.minimum(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), FP16_MAX)

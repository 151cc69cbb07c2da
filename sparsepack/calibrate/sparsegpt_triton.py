"""SparseGPT's loop over the columns of one block as one Triton kernel: rows do not depend on each other.

Column by column in torch, a GPU waits for some ten launches a column, 130 to 150 us together; here a block of 128
columns takes as long as two or three of its columns did there (benchmarks/RESULTS.md).

    block    [columns, rows] float32, each column in one piece; a program's tile [COLUMNS, ROWS] stays in registers
    factor   of U of `Inputs.inverse_factor` what concerns these columns alone, [columns, columns]

A group's mask is chosen when its first column is reached. A column that goes leaves the error w / U_jj, which times row
j of U is taken off the block's later columns at once; `feedback` takes errors off the columns behind the block.
"""

# Triton has no type stubs, and its functions take tensors and compile-time constants without saying which.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, warn-return-any=False

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepack.models.pattern import Pattern

ROWS = 16
"""A program, which is one warp, has so many rows: with 128 columns these take 64 registers of each thread."""


def prune_block(block: Tensor, factor: Tensor, first: int, pattern: Pattern) -> Tensor:
    """Prune a block of columns, contiguous float32 [columns, rows], in place, whole groups but for the matrix's last
    one; returns their errors, float32 [columns, rows].

    factor -- U, of all columns of the matrix
    first  -- the number of the block's first column in the matrix
    """
    columns, rows = block.shape
    errors = torch.empty_like(block)
    of_block = factor[first : first + columns, first : first + columns].contiguous()
    with torch.cuda.device(block.device) if block.is_cuda else nullcontext():
        _prune_block[(triton.cdiv(rows, ROWS),)](
            *(block, errors, of_block, columns, rows),
            KEEP=pattern.keep,
            OF=pattern.of,
            COLUMNS=max(triton.next_power_of_2(columns), 16),
            ROWS=ROWS,
            num_warps=1,
        )
    return errors


@triton.jit
def _prune_block(
    block,
    errors,
    factor,
    columns,
    rows,
    KEEP: tl.constexpr,
    OF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    number = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = number < columns
    places = number[:, None] * rows + row[None, :]
    inside = here[:, None] & (row < rows)[None, :]
    tile = tl.load(block + places, mask=inside, other=0.0)
    pivots = tl.load(factor + number * (columns + 1), mask=here, other=1.0)
    for start in range(0, COLUMNS, OF):
        scores = tile / pivots[:, None]
        scores = scores * scores
        better = tl.zeros([COLUMNS, ROWS], tl.int32)  # how many of the group are kept before each
        for member in range(0, OF):
            at = start + member
            other = tl.sum(tl.where((number == at)[:, None], scores, 0.0), 0)[None, :]
            wins = (other > scores) | ((other == scores) & (number > at)[:, None])
            better += (wins & (at < columns)).to(tl.int32)
        goes = better >= KEEP
        for member in range(0, OF):
            at = start + member
            gone = (number == at)[:, None] & goes
            pivot = tl.load(factor + at * (columns + 1), mask=at < columns, other=1.0)
            error = tl.sum(tl.where(gone, tile, 0.0), 0) / pivot
            later = tl.load(factor + at * columns + number, mask=here & (number > at), other=0.0)
            tile = tl.where(gone, 0.0, tile) - later[:, None] * error[None, :]
            tl.store(errors + at * rows + row, error, mask=(row < rows) & (at < columns))
    tl.store(block + places, tile, mask=inside)

"""Planes in pieces: superblocks of Q6_P taken apart into the 64 rows of a column that share a grid.

A superblock in zigzag order has 256 rows, which few matrices divide into so that tensor-parallel ranks get whole ones.
Its four groups of 64 rows know nothing of each other. A piece is one of them:

    byte    0     1      2 .. 17    18 .. 25   26 .. 33   34 .. 41   42 .. 49
          +-----+-----+----------+----------+----------+----------+----------+
          |  s  |  b  | plane 1  | plane 2  | plane 3  | plane 4  | plane 5  |
          +-----+-----+----------+----------+----------+----------+----------+

s, b, q and T are those of `blocks.q6_p`, weight for weight. Bits 2 k and 2 k + 1 of byte i of plane 1 are the upper two
of q of row 16 k + i; of each other plane bit k of byte i is that of row 8 k + i. A matrix is [pieces, columns, 50]:
piece p has the rows 64 p to 64 p + 63, missing ones as the encoder pads them.
"""

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q6_p
from sparsepack.formats.blocks.superblock import BLOCK, Parts
from sparsepack.formats.orders import zigzag

PIECE_ROWS, PIECE_BYTES = q6_p.GROUP, q6_p.BLOCK_BYTES // q6_p.GROUPS
_GRID, _FIRST = 2, PIECE_ROWS // 4
"""Bytes of s and b, and of plane 1; other planes have half as many."""


def pieces(rows: int) -> int:
    """How many pieces hold `rows` rows, the last perhaps in part."""
    return -(-rows // PIECE_ROWS)


def from_zigzag(blocks: Tensor, tail: Tensor | None, rows: int) -> Tensor:
    """The pieces of a matrix in zigzag order: uint8 [bands, columns, 200] and [superblocks, 200] -> [pieces, columns,
    50]. Not a bit of a weight changes."""
    columns, last = blocks.shape[1], zigzag.tail_pieces(rows) if tail is not None else 0
    parts = q6_p.CODEC.apart(blocks.flatten(0, 1))
    bands = blocks.shape[0]
    each = parts.each.view(bands, columns, q6_p.GROUPS, _GRID).transpose(1, 2).flatten(0, 1)
    q = parts.numbers.view(bands, columns, q6_p.GROUPS, PIECE_ROWS).transpose(1, 2).flatten(0, 1)
    if tail is not None:
        of_tail = q6_p.CODEC.apart(tail)
        used = columns * last
        each = torch.cat([each, of_tail.each.reshape(-1, _GRID)[:used].view(columns, last, _GRID).transpose(0, 1)])
        q = torch.cat([q, of_tail.numbers.view(-1, PIECE_ROWS)[:used].view(columns, last, PIECE_ROWS).transpose(0, 1)])
    count = pieces(rows)
    return _together(each[:count], q[:count])


def to_zigzag(stored: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """The inverse, of a matrix of so many rows by itself, as `zigzag.pack_with_tail` lays it out."""
    _check(stored, rows)
    each, q = _apart(stored, len(q6_p.LEVELS))
    return superblocks(each.transpose(0, 1), q.transpose(0, 1), rows)


def superblocks(each: Tensor, numbers: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """Bands and tail of a matrix of so many rows from its groups by columns.

    each    -- s and b: uint8 [columns, groups, 2]
    numbers -- q of weights: uint8 [columns, groups, 64]; rows beyond the last are padding

    Returns uint8 [bands, columns, 200] and, where the rows have a tail, [superblocks, 200].
    """
    together, bands = q6_p.CODEC.together, zigzag.bands(rows - zigzag.tail_rows(rows))
    columns, whole = len(each), bands * q6_p.GROUPS

    def of_groups(part: slice) -> Tensor:
        """Groups of each column, four to a superblock, behind the last ones of zeros: uint8 [superblocks, 200]."""
        scales, q = each[:, part].flatten(0, 1), numbers[:, part].flatten(0, 1)
        if missing := -len(q) % q6_p.GROUPS:
            zeros = q6_p.fit(torch.zeros(missing, 1, q6_p.GROUP, device=q.device))
            scales, q = (torch.cat([of, more[:, 0]]) for of, more in zip((scales, q), zeros, strict=True))
        count = len(q) // q6_p.GROUPS
        return together(Parts(q.new_empty(count, 0), scales.reshape(count, q6_p.GROUPS, 2), q.reshape(count, BLOCK)))

    blocks = of_groups(slice(0, whole)).view(columns, bands, q6_p.BLOCK_BYTES).transpose(0, 1).contiguous()
    return blocks, of_groups(slice(whole, None)) if zigzag.tail_pieces(rows) else None


def decode(stored: Tensor, rows: int, level: int = len(q6_p.LEVELS)) -> Tensor:
    """The weights that a reader of so many planes has, without scales of rows: uint8 [pieces, columns, 50] -> float32
    [rows, columns]."""
    _check(stored, rows)
    each, q = _apart(stored, level)
    scale, m = q6_p.steps_and_centres(each)
    points = q6_p.at_level(q, level).add_(m[..., None]).mul_(scale[..., None])  # [pieces, columns, 64]
    return points.transpose(1, 2).flatten(0, 1)[:rows]


def _check(stored: Tensor, rows: int) -> None:
    if stored.dtype != torch.uint8 or stored.dim() != 3 or stored.shape[::2] != (pieces(rows), PIECE_BYTES):
        raise PackingError(
            f"planes {list(stored.shape)} of {stored.dtype}: expected uint8 [{pieces(rows)}, columns, {PIECE_BYTES}] "
            f"for {rows} rows"
        )


def _together(each: Tensor, q: Tensor) -> Tensor:
    planes = [_bits(q >> 4, 2), *(_bits(q >> bit & 1, 1) for bit in (3, 2, 1, 0))]
    return torch.cat([each, *planes], -1)


def _bits(numbers: Tensor, bits: int) -> Tensor:
    """A plane of numbers of so many bits: uint8 [..., 64] -> [..., 8 bits], of eighths or quarters one behind the
    other."""
    plane = torch.zeros_like(numbers[..., : 8 * bits])
    for k, part in enumerate(numbers.chunk(8 // bits, -1)):
        plane |= part << bits * k
    return plane


def _apart(stored: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """s and b, uint8 [..., 2], and q, uint8 [..., 64], of which planes after `level` count as zeros."""
    at = _GRID + _FIRST
    q = torch.cat([stored[..., _GRID:at] >> 2 * k & 3 for k in range(4)], -1)
    width = PIECE_ROWS // 8
    for _ in range(level - 1):
        q = q << 1 | torch.cat([stored[..., at : at + width] >> k & 1 for k in range(8)], -1)
        at += width
    return stored[..., :_GRID], q << q6_p.LEVELS[-1] - q6_p.LEVELS[level - 1]

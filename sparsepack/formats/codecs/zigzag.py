"""Zigzag: a weight matrix as Q4_K superblocks that each lie within one input column (SpQt, section 4.1.2).

A band is 256 output rows. The superblock of band b and column j quantises weight[256 b : 256 b + 256, j], so that
skipping an input column skips whole superblocks. They are stored band by band, within a band column by column:

                  column 0     column 1           column K - 1
    band 0      | 144 bytes  | 144 bytes  | ... | 144 bytes    |     rows   0 .. 255
    band 1      | 144 bytes  | 144 bytes  | ... | 144 bytes    |     rows 256 .. 511, missing ones are zeros

Zeros cost as much as rows. Where at most 192 rows come after the whole bands, artifacts store these as a tail: pieces
of 64 rows of a column, P = 1, 2 or 3 for each, four to a superblock, column by column:

                  0 .. 63    64 .. 127     128 .. 191    192 .. 255   weights of a superblock
    P = 1       | column 0 | column 1    | column 2    | column 3   |
    P = 2       | column 0 : first, last | column 1 : first, last   |
    P = 3       | column 0 : first, second, third      | column 1.. |  d and dmin the same in 3 superblocks, 4 columns

So all pieces of a column have one d and one dmin, and a tail can be laid out as a band (`expand_tail`).
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.errors import PackingError
from sparsepack.formats.codecs import q4_k, q4_k_device
from sparsepack.formats.codecs.q4_k_fit import BLOCK_BYTES, LOWEST, SUB, encode_columns, encode_subs
from sparsepack.formats.codecs.superblock import BLOCK, encode_chunks, largest

BAND_ROWS = BLOCK
PIECE_ROWS = 64
_BALANCINGS = 4  # of rows and of columns; more change no model's perplexity
_BALANCED_AT_ONCE = 1 << 22  # weights, as float64
_MOST_SCALE = 8  # powers of two: d has no room for more
_PIECES, _PIECE_SUBS = BAND_ROWS // PIECE_ROWS, PIECE_ROWS // SUB


def bands(rows: int) -> int:
    """How many bands hold `rows` output rows, the last perhaps in part."""
    return -(-rows // BAND_ROWS)


def tail_pieces(rows: int) -> int:
    """Pieces of 64 rows that each column has in the tail, 1 to 3; 0: bands hold all rows, the last perhaps in part."""
    return -(-(rows % BAND_ROWS) // PIECE_ROWS) % _PIECES


def tail_rows(rows: int) -> int:
    """How many of a matrix's rows, the last, lie in its tail."""
    return rows % BAND_ROWS if tail_pieces(rows) else 0


def tail_blocks(rows: int, columns: int) -> int:
    """Superblocks of the tail."""
    return -(-columns * tail_pieces(rows) // _PIECES)


def row_scales(weight: Tensor) -> Tensor:
    """What to divide the rows of a matrix by before it is quantised: floats [rows, columns] -> float32 [rows].

    Rows and columns are divided in turns by their root mean squares, which balances them (Sinkhorn), and the rows'
    divisors are kept: superblocks have a scale for each column. Their geometric mean is 1, none is further from it
    than 8 powers of two, and a row of zeros has 1. Raises PackingError for weights that are not finite.
    """
    most, columns = largest(weight), torch.ones(weight.shape[1], dtype=torch.float64, device=weight.device)
    if most == 0:
        return torch.ones(len(weight), device=weight.device)
    parts = torch.split(weight.detach(), max(_BALANCED_AT_ONCE // weight.shape[1], 1))
    kept = [_squares(parts[0], most)] if len(parts) == 1 else None
    for _ in range(_BALANCINGS):
        rows, of_columns = [], torch.zeros_like(columns)
        for squares in kept or (_squares(part, most) for part in parts):
            rows.append(squares @ columns.reciprocal() / len(columns))
            of_columns += torch.where(rows[-1] > 0, 1 / rows[-1], 0) @ squares / len(weight)
        columns = torch.where(of_columns > 0, of_columns, 1)
    logs = torch.cat(rows).log2() / 2
    used = logs.isfinite()
    scales = torch.where(used, logs - logs[used].mean(), 0).clamp_(-_MOST_SCALE, _MOST_SCALE).exp2()
    # Of few bits, so that they, and all bytes, do not depend on the order in which a device adds.
    return scales.bfloat16().float()


def _squares(weight: Tensor, most: float) -> Tensor:
    return weight.double().div_(most).square_()


def pack(weight: Tensor) -> Tensor:
    """Quantise to zigzag Q4_K: float32, float16 or bfloat16 [rows, columns] -> uint8 [bands, columns, 144].

    Rows are padded with zeros to whole bands; the caller keeps `rows`. Works on the weight's device as `q4_k.encode`
    does, without a padded copy. Raises PackingError for a weight that is not a matrix, or not finite.
    """
    if weight.dim() != 2:
        raise PackingError(f"weight {list(weight.shape)}: zigzag packs a matrix [rows, columns]")
    beyond = largest(weight) > -LOWEST
    weight = weight.detach()
    blocks = q4_k_device.encode(weight)
    if blocks is None:
        count = bands(weight.shape[0]) * weight.shape[1]
        made = partial(_encoded, weight, beyond)
        blocks = encode_chunks(count, BLOCK_BYTES, weight.device, made)
    return blocks.view(bands(weight.shape[0]), weight.shape[1], BLOCK_BYTES)


def pack_with_tail(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Quantise as artifacts store it: floats [rows, columns] -> the bands, uint8 [bands, columns, 144], of which none
    may be left, and the tail, uint8 [superblocks, 144]; None: the rows have none. Raises PackingError as `pack`."""
    if weight.dim() != 2 or not tail_pieces(len(weight)):
        return pack(weight), None
    whole = len(weight) - tail_rows(len(weight))
    return pack(weight[:whole]), pack_tail(weight[whole:])


def pack_tail(weight: Tensor) -> Tensor:
    """Quantise the rows of a tail: floats [1 to 192 rows, columns] -> uint8 [superblocks, 144].

    Raises PackingError for weights that are not finite.
    """
    rows, columns = weight.shape
    pieces, count = tail_pieces(rows), tail_blocks(rows, columns)
    flat = torch.zeros(count * BLOCK, device=weight.device)
    flat[: columns * pieces * PIECE_ROWS].view(columns, -1)[:, :rows] = weight.detach().t()
    blocks = q4_k.encode(flat.view(count, BLOCK))
    if pieces == 3 and count:
        _share_steps(blocks, flat)
    return blocks


def _share_steps(blocks: Tensor, flat: Tensor) -> None:
    """Give every three superblocks the largest d and dmin among them, and quantise anew: uint8 [n, 144], written to,
    and float32 [256 n]."""
    steps = functional.pad(_steps(blocks), (0, 0, 0, -len(blocks) % 3)).view(-1, 3, 2).amax(1)
    steps = steps.repeat_interleave(3, 0)[: len(blocks)]
    d, dmin = steps.repeat_interleave(BLOCK // SUB, 0).unbind(1)
    scales, mins, nibbles = encode_subs(flat.view(-1, SUB).t().contiguous(), d, dmin)
    blocks[:, :4] = steps.half().view(torch.uint8)
    q4_k.set_scales_and_mins(blocks, scales.view(len(blocks), -1), mins.view(len(blocks), -1))
    q4_k.set_nibbles(blocks, nibbles.t().reshape(-1, BLOCK))


def _steps(blocks: Tensor) -> Tensor:
    """d and dmin of superblocks: uint8 [n, 144] -> float32 [n, 2]."""
    return blocks[:, :4].contiguous().view(torch.float16).float()


def unpack_tail(tail: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise the tail of a matrix of so many rows: uint8 [superblocks, 144] -> `dtype` [tail rows, columns].

    Raises PackingError where `tail` is none of such a matrix.
    """
    _check_tail(tail, rows, columns)
    pieces = tail_pieces(rows)
    weights = q4_k.decode(tail, dtype).view(-1)[: columns * pieces * PIECE_ROWS]
    return weights.view(columns, pieces * PIECE_ROWS)[:, : tail_rows(rows)].t()


def expand_tail(tail: Tensor, rows: int, columns: int) -> Tensor:
    """The same weights as a band that is padded with zeros: uint8 [superblocks, 144] -> uint8 [columns, 144].

    Raises PackingError as `check_steps`.
    """
    check_steps(tail, rows, columns)
    pieces = tail_pieces(rows)
    band = torch.zeros(columns, BLOCK_BYTES, dtype=torch.uint8, device=tail.device)
    band[:, :4] = tail[torch.arange(columns, device=tail.device) * pieces // _PIECES, :4]
    numbers = [
        functional.pad(each.reshape(-1, _PIECE_SUBS)[: columns * pieces].reshape(columns, -1), (0, 8 - 2 * pieces))
        for each in q4_k.scales_and_mins(tail)
    ]
    q4_k.set_scales_and_mins(band, *numbers)
    band[:, 16 : 16 + SUB * pieces] = tail[:, 16:].reshape(-1, SUB)[: columns * pieces].view(columns, -1)
    return band


def check_steps(tail: Tensor, rows: int, columns: int) -> None:
    """Raise PackingError unless `tail` is one of a matrix [rows, columns], and pieces of a column have the same d and
    dmin: who runs the matrix relies on it."""
    _check_tail(tail, rows, columns)
    pieces = torch.arange(columns, device=tail.device) * tail_pieces(rows)
    first, last = (tail[each // _PIECES, :4] for each in (pieces, pieces + tail_pieces(rows) - 1))
    if not torch.equal(first, last):
        raise PackingError("zigzag tail: d or dmin differ within a column, expected the same; pack the model again")


def _check_tail(tail: Tensor, rows: int, columns: int) -> None:
    expected = (tail_blocks(rows, columns), BLOCK_BYTES)
    if not tail_pieces(rows) or tail.shape != expected:
        raise PackingError(f"zigzag tail {list(tail.shape)}: expected {list(expected)} for {rows} rows")


def tail_steps(tail: Tensor, rows: int, columns: int) -> Tensor:
    """d and dmin of each column of a tail: uint8 [superblocks, 144] -> float32 [columns, 2]."""
    return _steps(tail)[torch.arange(columns, device=tail.device) * tail_pieces(rows) // _PIECES]


def set_tail(tail: Tensor, rows: int, bands: Tensor) -> None:
    """Put other weights into a tail, whose d and dmin stay as they are: what `expand_tail` gives, uint8 [columns, 144],
    with other scales, mins and nibbles."""
    pieces, columns = tail_pieces(rows), len(bands)

    def spread(each: Tensor) -> Tensor:
        """The first `pieces` quarters of each column, one after the other: [columns, 4, n] -> [superblocks, 4 n]."""
        flat = each[:, :pieces].reshape(columns * pieces, -1)
        return functional.pad(flat, (0, 0, 0, -len(flat) % _PIECES)).reshape(len(tail), -1)

    scales, mins = (spread(each.view(columns, _PIECES, _PIECE_SUBS)) for each in q4_k.scales_and_mins(bands))
    q4_k.set_scales_and_mins(tail, scales, mins)
    tail[:, 16:] = spread(bands[:, 16:].reshape(columns, _PIECES, SUB))


def set_tail_column(tail: Tensor, rows: int, number: int, column: Tensor) -> Tensor:
    """Put other weights into a column of a tail, whose d and dmin stay as they are: they are its neighbours' too.

    tail   -- uint8 [superblocks, 144], of a matrix of so many rows, written to
    column -- float32 [tail rows], finite

    Returns what the column decodes to.
    """
    pieces = tail_pieces(rows)
    first = number * pieces
    blocks = tail[first // _PIECES : (first + pieces - 1) // _PIECES + 1]
    at = first % _PIECES
    subs = slice(at * _PIECE_SUBS, (at + pieces) * _PIECE_SUBS)
    d, dmin = _steps(blocks).repeat_interleave(BLOCK // SUB, 0)[subs].unbind(1)
    x = functional.pad(column, (0, pieces * PIECE_ROWS - len(column))).view(-1, SUB).t().contiguous()
    scale, minimum, nibbles = encode_subs(x, d, dmin)
    scales, mins = q4_k.scales_and_mins(blocks)
    scales.view(-1)[subs], mins.view(-1)[subs] = scale, minimum
    q4_k.set_scales_and_mins(blocks, scales, mins)
    pairs = nibbles.t().reshape(pieces, _PIECE_SUBS, SUB)
    quarters = blocks[:, 16:].clone().view(-1, SUB)
    quarters[at : at + pieces] = pairs[:, 0] | pairs[:, 1] << 4
    blocks[:, 16:] = quarters.view(len(blocks), -1)
    return tail_column(tail, rows, number)


def tail_column(tail: Tensor, rows: int, number: int) -> Tensor:
    """Dequantise one column of a tail: uint8 [superblocks, 144] -> float32 [tail rows]."""
    first, pieces = number * tail_pieces(rows), tail_pieces(rows)
    blocks = tail[first // _PIECES : (first + pieces - 1) // _PIECES + 1]
    return q4_k.CODEC.decode_chunk(blocks).view(-1)[first % _PIECES * PIECE_ROWS :][: tail_rows(rows)]


def pack_column(column: Tensor) -> Tensor:
    """One column, known to be finite, as `pack` stores it: float32 [rows] -> uint8 [bands, 144]."""
    blocks = q4_k_device.encode(column[:, None])
    if blocks is None:
        padded = functional.pad(column, (0, -len(column) % BAND_ROWS))
        blocks = encode_columns(padded.view(-1, BAND_ROWS).t().contiguous(), beyond=True).t()
    return blocks


def unpack_column(blocks: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_column`: uint8 [bands, 144] -> float32 [rows]."""
    return q4_k.CODEC.decode_chunk(blocks).view(-1)[:rows]


def _encoded(weight: Tensor, beyond: bool, part: slice) -> Tensor:
    return encode_columns(_columns(weight, part), beyond).t()


def _columns(weight: Tensor, part: slice) -> Tensor:
    """Superblocks `part` of the zigzag order, in columns: float32 [256, n], with zeros for missing rows."""
    rows, columns = weight.shape
    out = torch.empty(BAND_ROWS, part.stop - part.start, device=weight.device)
    for band in range(part.start // columns, (part.stop - 1) // columns + 1):
        start, stop = max(part.start, band * columns), min(part.stop, (band + 1) * columns)
        here = out[:, start - part.start : stop - part.start]
        top = band * BAND_ROWS
        held = min(BAND_ROWS, rows - top)
        here[:held] = weight[top : top + held, start - band * columns : stop - band * columns]
        here[held:] = 0
    return out


def unpack(blocks: Tensor, rows: int, dtype: torch.dtype = torch.float32, tail: Tensor | None = None) -> Tensor:
    """Dequantise: uint8 [bands, columns, 144] -> `dtype` [rows, columns].

    tail -- uint8 [superblocks, 144]; None: bands hold all rows

    Raises PackingError where `blocks` and `tail` are not a zigzag matrix of `rows` rows.
    """
    whole = rows if tail is None else rows - tail_rows(rows)
    if blocks.dim() != 3 or blocks.shape[2] != BLOCK_BYTES or blocks.shape[0] != bands(whole):
        raise PackingError(
            f"zigzag blocks {list(blocks.shape)}: expected [{bands(whole)}, columns, {BLOCK_BYTES}] for {whole} rows"
        )
    weight = torch.empty(rows, blocks.shape[1], dtype=dtype, device=blocks.device)
    for band in range(blocks.shape[0]):
        top = band * BAND_ROWS
        weight[top : min(top + BAND_ROWS, whole)] = q4_k.decode(blocks[band], dtype).t()[: whole - top]
    if tail is not None:
        weight[whole:] = unpack_tail(tail, rows, blocks.shape[1], dtype)
    return weight

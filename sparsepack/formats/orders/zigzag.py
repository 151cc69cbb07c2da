"""Zigzag: a weight matrix as superblocks that each lie within one input column (SpQt, section 4.1.2).

A superblock is one block of 256 weights or eight of 32: 144 bytes of Q4_K, 210 of Q6_K, 272 of Q8_0. A band is 256
output rows. The superblock of band b and column j quantises weight[256 b : 256 b + 256, j], so that skipping an input
column skips whole superblocks. They are stored band by band, within a band column by column:

                  column 0     column 1           column K - 1
    band 0      | superblock | superblock | ... | superblock   |     rows   0 .. 255
    band 1      | superblock | superblock | ... | superblock   |     rows 256 .. 511, missing ones are zeros

Zeros cost as much as rows. Where at most 192 rows come after the whole bands, artifacts store these as a tail: pieces
of 64 rows of a column, P = 1, 2 or 3 for each, four to a superblock, column by column:

                  0 .. 63    64 .. 127     128 .. 191    192 .. 255   weights of a superblock
    P = 1       | column 0 | column 1    | column 2    | column 3   |
    P = 2       | column 0 : first, last | column 1 : first, last   |
    P = 3       | column 0 : first, second, third      | column 1.. |  d and dmin the same in 3 superblocks, 4 columns

So all pieces of a column have one d and one dmin, where a block of the type has 256 weights, and a tail can be laid out
as a band (`expand_tail`). `block` is the name of the type, a row of `blocks.table.BLOCKS`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import cpu_encoder
from sparsepack.formats.blocks.superblock import BLOCK, BlockCodec, Parts, encode_chunks, largest
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.runtime.cpu.machine import instruction_set

BAND_ROWS = BLOCK
PIECE_ROWS = 64
_BALANCINGS = 4  # of rows and of columns; more change no model's perplexity
_BALANCED_AT_ONCE = 1 << 22  # weights, as float64
_MOST_SCALE = 8  # powers of two: d has no room for more
_PIECES = BAND_ROWS // PIECE_ROWS
_BY_COST = 0.2  # of a row's root mean square times that of its gradients
_LEAST_COST = 0.01  # of the rows' mean


def superblock_bytes(block: str) -> int:
    """Bytes of 256 weights of a type."""
    return BLOCK // BLOCKS[block].weights * BLOCKS[block].bytes


def codec_of(block: str) -> BlockCodec:
    """What encodes and decodes blocks of a type."""
    codec = BLOCKS[block].codec
    assert isinstance(codec, BlockCodec)
    return codec


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


def row_scales(weight: Tensor, costs: Tensor | None = None) -> Tensor:
    """What to divide the rows of a matrix by before it is quantised: floats [rows, columns] -> float32 [rows].

    costs -- what a squared error of each row costs, float32 [rows]: the more, the finer it is quantised beside the
             others of its groups; None: all the same

    Rows and columns are divided in turns by their root mean squares, which balances them (Sinkhorn), and the rows'
    divisors are kept: superblocks have a scale for each column. Their geometric mean is 1, none is further from it
    than 8 powers of two, and a row of zeros has 1. Raises PackingError for weights that are not finite.
    """
    most = largest(weight)
    if most == 0:
        return torch.ones(len(weight), device=weight.device)
    logs = balanced_squares(weight.detach(), most).log2() / 2
    if costs is not None:
        # Were groups as wide as their mean square, half of what a row's error costs would be right; they are wider.
        costs = costs.double() / costs.double().mean().clamp_min(torch.finfo(torch.float64).tiny)
        logs -= _BY_COST * (logs + (costs + _LEAST_COST).log2() / 2)
    used = logs.isfinite()
    scales = torch.where(used, logs - logs[used].mean(), 0).clamp_(-_MOST_SCALE, _MOST_SCALE).exp2()
    # Of few bits, so that they, and all bytes, do not depend on the order in which a device adds.
    return scales.bfloat16().float()


def balanced_squares(weight: Tensor, most: float) -> Tensor:
    """The rows' mean squares when rows and columns have been divided in turns, but for a factor that all have: floats
    [rows, columns], the largest of which is `most` -> float64 [rows]."""
    found = cpu_encoder.kernels() if weight.device.type == "cpu" else None
    if found is not None:
        rows = torch.empty(len(weight), dtype=torch.float64)
        of_kernel = (_BALANCINGS, instruction_set(), torch.get_num_threads())
        found.balance(weight.float().contiguous().numpy(), rows.numpy(), *of_kernel)
        return rows
    columns = torch.ones(weight.shape[1], dtype=torch.float64, device=weight.device)
    parts = torch.split(weight, max(_BALANCED_AT_ONCE // weight.shape[1], 1))
    kept = [_squares(parts[0], most)] if len(parts) == 1 else None
    for _ in range(_BALANCINGS):
        of_parts, of_columns = [], torch.zeros_like(columns)
        for squares in kept or (_squares(part, most) for part in parts):
            of_parts.append(squares @ columns.reciprocal() / len(columns))
            of_columns += torch.where(of_parts[-1] > 0, 1 / of_parts[-1], 0) @ squares / len(weight)
        columns = torch.where(of_columns > 0, of_columns, 1)
    return torch.cat(of_parts)


def _squares(weight: Tensor, most: float) -> Tensor:
    return weight.double().div_(most).square_()


def pack(weight: Tensor, block: str = "Q4_K", divisors: Tensor | None = None) -> Tensor:
    """Quantise: float32, float16 or bfloat16 [rows, columns] -> uint8 [bands, columns, superblock bytes].

    divisors -- what each row is divided by first, float32 [rows]; None: nothing

    Rows are padded with zeros to whole bands; the caller keeps `rows`. Works on the weight's device as `Block.encode`
    does, without a padded copy. Raises PackingError for a weight that is not a matrix, or not finite.
    """
    if weight.dim() != 2:
        raise PackingError(f"weight {list(weight.shape)}: zigzag packs a matrix [rows, columns]")
    most, codec, size = largest(weight), codec_of(block), superblock_bytes(block)
    weight = weight.detach()
    blocks = codec.zigzag(weight, divisors)
    if blocks is None:
        if divisors is not None:
            weight = weight.float() / divisors[:, None]
            most = largest(weight)

        def encoded(part: slice) -> Tensor:
            flat = _columns(weight, part).t().reshape(-1, BLOCKS[block].weights)
            return codec.encode_chunk(flat, most).reshape(-1, size)

        blocks = encode_chunks(bands(weight.shape[0]) * weight.shape[1], size, weight.device, encoded)
    return blocks.view(bands(weight.shape[0]), weight.shape[1], size)


def pack_with_tail(weight: Tensor, block: str = "Q4_K", divisors: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Quantise as artifacts store it: floats [rows, columns] -> the bands, as `pack` makes them, of which none may be
    left, and the tail, uint8 [superblocks, bytes]; None: the rows have none. Raises PackingError as `pack`.

    divisors -- what each row is divided by first, float32 [rows]; None: nothing
    """
    if weight.dim() != 2 or not tail_pieces(len(weight)):
        return pack(weight, block, divisors), None
    whole = len(weight) - tail_rows(len(weight))
    first, last = (None, None) if divisors is None else (divisors[:whole], divisors[whole:])
    rest = weight[whole:] if last is None else weight[whole:].float() / last[:, None]
    return pack(weight[:whole], block, first), pack_tail(rest, block)


def pack_tail(weight: Tensor, block: str = "Q4_K") -> Tensor:
    """Quantise the rows of a tail: floats [1 to 192 rows, columns] -> uint8 [superblocks, bytes].

    Raises PackingError for weights that are not finite.
    """
    rows, columns = weight.shape
    pieces, count, codec = tail_pieces(rows), tail_blocks(rows, columns), codec_of(block)
    flat = torch.zeros(count * BLOCK, device=weight.device)
    flat[: columns * pieces * PIECE_ROWS].view(columns, -1)[:, :rows] = weight.detach().t()
    flat = flat.view(count, BLOCK)
    blocks = codec.encode(flat)
    if pieces == 3 and count and codec.encode_given is not None:
        # Every three superblocks get the largest d and dmin among them, and are quantised anew.
        shared = _floats(codec.apart(blocks).shared)
        steps = functional.pad(shared.abs(), (0, 0, 0, -count % 3)).view(-1, 3, shared.shape[1]).amax(1)
        blocks = codec.encode_given(flat, steps.repeat_interleave(3, 0)[:count].half().view(torch.uint8))
    return blocks


def _floats(shared: Tensor) -> Tensor:
    """What superblocks share, as numbers: uint8 [n, bytes] -> float32 [n, bytes / 2]."""
    return shared.contiguous().view(torch.float16).float()


def unpack_tail(
    tail: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32, block: str = "Q4_K", level: int = 0
) -> Tensor:
    """Dequantise the tail of a matrix of so many rows: uint8 [superblocks, bytes] -> `dtype` [tail rows, columns].

    level -- of blocks with planes, how many are read; 0: all

    Raises PackingError where `tail` is none of such a matrix.
    """
    _check_tail(tail, rows, columns, block)
    pieces = tail_pieces(rows)
    weights = BLOCKS[block].decode(tail, dtype, level).view(-1)[: columns * pieces * PIECE_ROWS]
    return weights.view(columns, pieces * PIECE_ROWS)[:, : tail_rows(rows)].t()


def expand_tail(tail: Tensor, rows: int, columns: int, block: str = "Q4_K") -> Tensor:
    """The same weights as a band that is padded with zeros: uint8 [superblocks, bytes] -> uint8 [columns, bytes].

    Raises PackingError as `check_steps`.
    """
    check_steps(tail, rows, columns, block)
    pieces, parts = tail_pieces(rows), codec_of(block).apart(tail)

    def gathered(each: Tensor) -> Tensor:
        """Quarters of superblocks [superblocks, 4 n, ..] to the first ones of each column: [columns, 4 n, ..]."""
        quarters = each.reshape(len(tail) * _PIECES, -1)[: columns * pieces].reshape(columns, -1)
        whole = functional.pad(quarters, (0, quarters.shape[1] // pieces * (_PIECES - pieces)))
        return whole.view(columns, *each.shape[1:])

    shared = parts.shared[torch.arange(columns, device=tail.device) * pieces // _PIECES]
    return codec_of(block).together(Parts(shared, gathered(parts.each), gathered(parts.numbers)))


def check_steps(tail: Tensor, rows: int, columns: int, block: str = "Q4_K") -> None:
    """Raise PackingError unless `tail` is one of a matrix [rows, columns], and pieces of a column have the same d and
    dmin: who runs the matrix relies on it."""
    _check_tail(tail, rows, columns, block)
    shared = codec_of(block).apart(tail).shared
    pieces = torch.arange(columns, device=tail.device) * tail_pieces(rows)
    first, last = (shared[each // _PIECES] for each in (pieces, pieces + tail_pieces(rows) - 1))
    if not torch.equal(first, last):
        raise PackingError("zigzag tail: d or dmin differ within a column, expected the same; pack the model again")


def _check_tail(tail: Tensor, rows: int, columns: int, block: str) -> None:
    expected = (tail_blocks(rows, columns), superblock_bytes(block))
    if not tail_pieces(rows) or tail.shape != expected:
        raise PackingError(f"zigzag tail {list(tail.shape)}: expected {list(expected)} for {rows} rows")


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


def unpack(
    blocks: Tensor,
    rows: int,
    dtype: torch.dtype = torch.float32,
    tail: Tensor | None = None,
    block: str = "Q4_K",
    level: int = 0,
) -> Tensor:
    """Dequantise: uint8 [bands, columns, superblock bytes] -> `dtype` [rows, columns].

    tail  -- uint8 [superblocks, bytes]; None: bands hold all rows
    level -- of blocks with planes, how many are read; 0: all

    Raises PackingError where `blocks` and `tail` are not a zigzag matrix of `rows` rows.
    """
    whole, size = rows if tail is None else rows - tail_rows(rows), superblock_bytes(block)
    if blocks.dim() != 3 or blocks.shape[2] != size or blocks.shape[0] != bands(whole):
        raise PackingError(
            f"zigzag blocks {list(blocks.shape)}: expected [{bands(whole)}, columns, {size}] for {whole} rows"
        )
    weight = torch.empty(rows, blocks.shape[1], dtype=dtype, device=blocks.device)
    if level or not cpu_encoder.decode_on_cpu(block, blocks, weight[:whole]):
        for band in range(blocks.shape[0]):
            top, decoded = band * BAND_ROWS, BLOCKS[block].decode(blocks[band], dtype, level)
            weight[top : min(top + BAND_ROWS, whole)] = decoded.t()[: whole - top]
    if tail is not None:
        weight[whole:] = unpack_tail(tail, rows, blocks.shape[1], dtype, block, level)
    return weight

"""GPTQ: what rounding a weight does to the outputs, weights that are rounded later put right (Frantar et al., 2022).

The columns of a matrix are quantised one after the other (`reconstruction`). Scales are fitted when their
first column is reached, to the values as they then are. Where no scale spans several columns, or one spans all, columns
come in the order of their inputs' sizes: the largest first, while most columns are left to make up for them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.formats.blocks import q4_k, q4_k_device
from sparsepack.formats.blocks.q4_k import BLOCK_BYTES, SUB, SUBS, encode_columns, encode_subs
from sparsepack.formats.blocks.superblock import BLOCK, Parts, largest
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.slide import scales
from sparsepack.reconstruction import Change, Inputs, fed_back


def zigzag_blocks(weight: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Superblocks in zigzag order, as `zigzag.pack_with_tail` makes: float32 [rows, columns] -> uint8 [bands, columns,
    144] and, where the rows have a tail, uint8 [superblocks, 144].

    In a tail several columns share d and dmin: these are fitted to the weights as they come.
    Raises `PackingError` as `zigzag.pack`, `SingularError` as `Inputs.inverse_factor`.
    """
    largest(weight)
    whole = len(weight) - zigzag.tail_rows(len(weight))
    # No row depends on another one, but for the scales that they share.
    tail = None if whole == len(weight) else _tail(weight[whole:], inputs)
    if whole == 0:
        return weight.new_empty(0, weight.shape[1], BLOCK_BYTES, dtype=torch.uint8), tail
    return _bands(weight[:whole], inputs), tail


def _bands(weight: Tensor, inputs: Inputs) -> Tensor:
    order, ordered = inputs.by_size
    blocks = weight.new_empty(weight.shape[1], zigzag.bands(len(weight)), BLOCK_BYTES, dtype=torch.uint8)

    def begin(number: int, _: Tensor) -> Change:
        def change(_: int, column: Tensor) -> Tensor:
            blocks[number] = pack_column(column)
            return unpack_column(blocks[number], len(column))

        return change

    def at_once(block: Tensor, factor: Tensor, first: int) -> Tensor | None:
        return q4_k_device.quantise_block(block, factor, first, blocks[first : first + len(block)])

    step = q4_k_device.columns_at_once(weight.device)
    fed_back(weight, ordered, begin, at_once=at_once, step=step, order=order)
    found = torch.empty_like(blocks)
    found[order] = blocks
    return found.transpose(0, 1).contiguous()


def _tail(weight: Tensor, inputs: Inputs) -> Tensor:
    """The tail of 1 to 192 rows. It is made on the CPU, whose kernel takes given d and dmin: few models have one, and
    few rows of them."""
    device, rows = weight.device, len(weight)
    tail, (order, ordered) = zigzag.pack_tail(weight.cpu()), inputs.by_size
    columns = order.tolist()
    steps = _tail_steps(tail, rows, len(columns))[order.cpu()].contiguous()
    bands = torch.empty(len(columns), 1, BLOCK_BYTES, dtype=torch.uint8)

    def begin(number: int, _: Tensor) -> Change:
        return lambda _, column: set_tail_column(tail, rows, columns[number], column)

    def at_once(block: Tensor, factor: Tensor, first: int) -> Tensor | None:
        here = slice(first, first + len(block))
        return q4_k_device.quantise_block(block, factor, first, bands[here], steps[here])

    fed_back(weight[:, order].cpu(), ordered.to("cpu"), begin, at_once=at_once, step=q4_k_device.COLUMNS)
    if q4_k_device.on_cpu():
        found = torch.empty_like(bands)
        found[order.cpu()] = bands
        _set_tail(tail, rows, found[:, 0])
    return tail.to(device)


def _steps(blocks: Tensor) -> Tensor:
    """d and dmin of superblocks: uint8 [n, 144] -> float32 [n, 2]."""
    return blocks[:, :4].contiguous().view(torch.float16).float()


def _tail_steps(tail: Tensor, rows: int, columns: int) -> Tensor:
    """d and dmin of each column of a tail: uint8 [superblocks, 144] -> float32 [columns, 2]."""
    return _steps(tail)[torch.arange(columns, device=tail.device) * zigzag.tail_pieces(rows) // 4]


def _set_tail(tail: Tensor, rows: int, bands: Tensor) -> None:
    """Put other weights into a tail, whose d and dmin stay as they are: what `zigzag.expand_tail` gives, uint8
    [columns, 144], with other scales, mins and nibbles."""
    pieces, columns, parts = zigzag.tail_pieces(rows), len(bands), q4_k.CODEC.apart(bands)

    def spread(each: Tensor) -> Tensor:
        """The first quarters of each column, one after the other: [columns, 4 n, ..] -> [superblocks, 4 n, ..]."""
        flat = each.reshape(columns, 4, -1)[:, :pieces].reshape(columns * pieces, -1)
        return functional.pad(flat, (0, 0, 0, -len(flat) % 4)).view(len(tail), *each.shape[1:])

    tail[:] = q4_k.CODEC.together(Parts(tail[:, :4], spread(parts.each), spread(parts.numbers)))


def set_tail_column(tail: Tensor, rows: int, number: int, column: Tensor) -> Tensor:
    """Put other weights into a column of a tail, whose d and dmin stay as they are: they are its neighbours' too.

    tail   -- uint8 [superblocks, 144], of a matrix of so many rows, written to
    column -- float32 [tail rows], finite

    Returns what the column decodes to.
    """
    pieces, piece_subs = zigzag.tail_pieces(rows), SUBS // 4
    first = number * pieces
    blocks = tail[first // 4 : (first + pieces - 1) // 4 + 1]
    subs = slice(first % 4 * piece_subs, (first % 4 + pieces) * piece_subs)
    d, dmin = _steps(blocks).repeat_interleave(SUBS, 0)[subs].unbind(1)
    x = functional.pad(column, (0, pieces * zigzag.PIECE_ROWS - len(column))).view(-1, SUB).t().contiguous()
    scale, minimum, nibbles = encode_subs(x, d, dmin)
    parts = q4_k.CODEC.apart(blocks)
    parts.each.view(-1, 2)[subs] = torch.stack([scale, minimum], dim=1)
    parts.numbers.view(-1, SUB)[subs] = nibbles.t()
    blocks[:] = q4_k.CODEC.together(parts)
    return q4_k.CODEC.decode_chunk(blocks).view(-1, SUB)[subs].reshape(-1)[: zigzag.tail_rows(rows)]


def pack_column(column: Tensor) -> Tensor:
    """One column, known to be finite, as `zigzag.pack` stores it: float32 [rows] -> uint8 [bands, 144]."""
    blocks = q4_k_device.encode(column[:, None])
    if blocks is None:
        padded = functional.pad(column, (0, -len(column) % BLOCK))
        blocks = encode_columns(padded.view(-1, BLOCK).t().contiguous(), beyond=True).t()
    return blocks


def unpack_column(blocks: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_column`: uint8 [bands, 144] -> float32 [rows]."""
    return q4_k.CODEC.decode_chunk(blocks).view(-1)[:rows]


def q4_k_rows(weight: Tensor, inputs: Inputs) -> Tensor:
    """Superblocks along rows, as `q4_k.encode` makes: float32 [rows, columns] -> uint8 [rows, bytes per row].

    The columns of a superblock come one after the other, with scales that fit the superblock as it is before them.
    Raises `PackingError` as `q4_k.encode`, `SingularError` as `Inputs.inverse_factor`.
    """
    blocks = q4_k.encode(weight).view(len(weight), -1, BLOCK_BYTES)

    def begin(first: int, group: Tensor) -> Change:
        here = blocks[:, first // BLOCK]
        here.copy_(q4_k.encode(group))
        unit, offset = q4_k.steps(here)
        nibbles = torch.empty(len(weight), BLOCK, dtype=torch.uint8, device=weight.device)

        def change(number: int, column: Tensor) -> Tensor:
            step, least = unit[:, number // SUB], offset[:, number // SUB]
            q = torch.where(step > 0, (column + least) / step, 0).round_().clamp_(0, 15)
            nibbles[:, number] = q.to(torch.uint8)
            if number == BLOCK - 1:
                q4_k.set_nibbles(here, nibbles)
            return q * step - least

        return change

    fed_back(weight, inputs, begin, BLOCK)
    return blocks.view(len(weight), -1)


def symmetric_rows(weight: Tensor, inputs: Inputs, dtype: torch.dtype, steps: float) -> tuple[Tensor, Tensor]:
    """Rows with one scale each, that of the row as it comes, as of `symmetric.quantise_rows`: float32 [rows, columns]
    -> q, values of `dtype` in float32 [rows, columns], and scale, float32 [rows]. A weight that is zero stays zero.

    Raises `PackingError` as `symmetric.quantise_rows`, `SingularError` as `Inputs.inverse_factor`.
    """
    scale, inverse = scales(weight, steps)
    order, ordered = inputs.by_size
    stays, quantised = weight[:, order] != 0, torch.empty_like(weight)

    def begin(number: int, _: Tensor) -> Change:
        def change(_: int, column: Tensor) -> Tensor:
            q = (column * inverse).clamp_(-steps, steps)
            q = (q if dtype.is_floating_point else q.round_()).to(dtype).float()
            quantised[:, number] = torch.where(stays[:, number], q, 0)
            return quantised[:, number] * scale

        return change

    fed_back(weight, ordered, begin, order=order)
    found = torch.empty_like(quantised)
    found[:, order] = quantised
    return found, scale

"""GPTQ for nested planes: a column is read at several levels, and what it loses at all of them is put right at once.

Where a token reads column j at level l, its output loses e_lj x_j, e_lj the column less what that level knows of it;
where it reads nothing, w_j x_j. What of this the columns after j can make up for is what their inputs tell of it: how
x_j, where it is read so, goes along with them. For inputs that are normal together, that is as they go along with x_j
anyhow, times the share of the squares of x_j that is read so. So what is fed back is the mean error,

    E_j = sum over l of p_lj e_lj        p_lj: the squares of x_j at level l, over those where it is read at all,

by the rule of GPTQ (`reconstruction`) with the products of what is read of the inputs. To keep products for each level
takes six times the arithmetic and gains nothing. Grids are fitted to the columns as they are when a block of them is
begun, by how often each is read at each level.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.formats.blocks import q6_p
from sparsepack.formats.blocks.cpu_encoder import kernels
from sparsepack.formats.blocks.superblock import largest
from sparsepack.formats.orders import planes, zigzag
from sparsepack.reconstruction import Inputs, fed_back
from sparsepack.runtime.cpu.machine import instruction_set

_AT_ONCE = 32
"""Grids are fitted for so many columns at a time: to those that come later in a block, little is added until then."""
_MOST_SKIPPED = 4.0
"""What a column loses where it is not read may count so many times as much as where it is: of rare inputs products say
little."""


def zigzag_blocks(weight: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Superblocks of Q6_P in zigzag order, as `zigzag.pack_with_tail` makes: float32 [rows, columns] -> uint8 [bands,
    columns, 200] and, where the rows have a tail, uint8 [superblocks, 200].

    Raises `PackingError` as `zigzag.pack`, `SingularError` as `Inputs.inverse_factor`.
    """
    if largest(weight) > q6_p.HIGHEST:
        weight = weight.clamp(-q6_p.HIGHEST, q6_p.HIGHEST)
    order, ordered = inputs.by_size
    feedback = _Feedback(len(weight), level_shares(ordered))
    fed_back(weight, ordered, None, at_once=feedback.at_once, step=_AT_ONCE, order=order)
    returned = order.argsort()
    return planes.superblocks(feedback.each[returned], feedback.numbers[returned], len(weight))


def level_shares(inputs: Inputs) -> Tensor:
    """p of each level, 0 for none: float32 [1 + levels, columns]. What was never read counts as read whole."""
    if inputs.levels is None:
        shares = inputs.moments.new_zeros(1 + len(q6_p.LEVELS), len(inputs.moments))
    else:
        shares = inputs.levels.clamp_max(_MOST_SKIPPED)
    shares[-1] += shares[1:].sum(0) == 0
    return shares


class _Feedback:
    """The columns of a matrix of so many rows while they are quantised.

    shares  -- as of `level_shares`, in the order of the columns
    each    -- s and b of groups that are made: uint8 [columns, groups, 2]
    numbers -- q of weights: uint8 [columns, groups, 64]; rows beyond the last are padding
    """

    def __init__(self, rows: int, shares: Tensor) -> None:
        self._rows, self._shares = rows, shares
        pieces = zigzag.tail_pieces(rows)
        groups = zigzag.bands(rows - zigzag.tail_rows(rows)) * q6_p.GROUPS + pieces
        self.each = shares.new_empty(shares.shape[1], groups, 2, dtype=torch.uint8)
        self.numbers = shares.new_empty(shares.shape[1], groups, q6_p.GROUP, dtype=torch.uint8)
        every = torch.arange(2 ** q6_p.LEVELS[-1], dtype=torch.uint8, device=shares.device)
        points = torch.stack([q6_p.at_level(every, level) for level in range(1, len(shares))])
        self._means = shares[1:].t() @ points  # T of each q, in the mean over levels: [columns, 64]

    def at_once(self, block: Tensor, factor: Tensor, first: int) -> Tensor:
        """Quantise a block of columns (`reconstruction.AtOnce`), on a CPU by a kernel where there is one."""
        here = slice(first, first + len(block))
        native = kernels() if block.device.type == "cpu" else None
        if native is not None:
            errors = torch.empty_like(block)
            given = (block, self._shares[:, here].t().contiguous(), factor[here, here].contiguous())
            made = (errors, self.each[here], self.numbers[here])
            arrays = [tensor.numpy() for tensor in (*given, *made)]
            native.quantise_q6_p(*arrays, instruction_set(), torch.get_num_threads())
            return errors
        shape = (*self.each.shape[1:2], q6_p.GROUP)
        pad = shape[0] * shape[1] - self._rows
        self.each[here], _ = q6_p.fit(functional.pad(block, (0, pad)).view(-1, *shape), self._shares[1:, here].t())
        scale, m = q6_p.steps_and_centres(self.each[here])
        read, counted = self._shares[1:].sum(0), self._shares.sum(0)
        errors, pivots = torch.zeros_like(block), factor.diagonal()
        for number, column in enumerate(block):
            at = first + number
            if number:
                column.addmv_(errors[:number].t(), factor[first:at, at], alpha=-1)
            x = functional.pad(column, (0, pad)).view(shape)
            q = q6_p.numbers(x, scale[number], m[number])
            known = self._means[at][q.int()].add_(m[number, :, None] * read[at]).mul_(scale[number, :, None])
            errors[number] = (x * counted[at] - known).view(-1)[: self._rows] / pivots[at]
            self.numbers[at] = q
        return errors

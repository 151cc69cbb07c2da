"""Column by column: what changing a column does to the outputs is put right by the columns that come after it.

The loop of SparseGPT (Frantar and Alistarh, 2023) and GPTQ (Frantar et al., 2022), which differ in what becomes of a
column. With U of the inputs' inverse products U^T U, an error in column j, divided by U_jj, times row j of U is taken
off the columns behind it. A column takes all errors of its block when its turn comes, and the columns behind the block
take them in one product.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsepack.reconstruction.inputs import Inputs

BLOCK = 128
"""The corrections of this many columns are put off for the columns behind them."""

Change = Callable[[int, Tensor], Tensor]
"""The function takes (number of a column in its group, the column float32 [rows]) and returns what becomes of it."""

Begin = Callable[[int, Tensor], Change]
"""The function takes (number of a group's first column, the group as it then is, float32 [rows, columns of the group])
and returns what changes its columns, one after the other."""


AtOnce = Callable[[Tensor, Tensor, int], Tensor | None]
"""The function takes (a block's columns float32 [columns, rows], which it changes in place, the factor U of all inputs,
number of the first of them) and returns the columns' errors, [columns, rows]; None where it cannot."""


def fed_back(
    weight: Tensor, inputs: Inputs, begin: Begin, group: int = 1, at_once: AtOnce | None = None, step: int = BLOCK
) -> Tensor:
    """float32 [rows, columns] -> its columns as `begin` would have them, in new memory.

    group   -- columns that are begun together; the last group may be shorter
    at_once -- does to all columns of a block what `begin` says of each, faster
    step    -- columns of a block, rounded down to whole groups, one at least

    Raises `SingularError` as `Inputs.inverse_factor`.
    """
    factor = inputs.inverse_factor
    columns = weight.t().clone(memory_format=torch.contiguous_format)  # each in one piece
    step = max(step // group, 1) * group
    for first in range(0, len(columns), step):
        block = columns[first : first + step]
        errors = None if at_once is None else at_once(block, factor, first)
        if errors is None:
            errors = _one_by_one(block, factor, first, begin, group)
        behind = first + len(block)
        columns[behind:].addmm_(factor[first:behind, behind:].t(), errors, alpha=-1)
    return columns.t()


def _one_by_one(block: Tensor, factor: Tensor, first: int, begin: Begin, group: int) -> Tensor:
    """Change a block's columns, [columns, rows], in place, one after the other; returns their errors."""
    pivots, errors = factor.diagonal(), torch.zeros_like(block)
    for start in range(0, len(block), group):
        here = block[start : start + group]
        of_here = slice(first + start, first + start + len(here))
        here.addmm_(factor[first : first + start, of_here].t(), errors[:start], alpha=-1)
        change = begin(first + start, here.t())
        for number, column in enumerate(here):
            at = first + start + number
            if number:
                column.addmv_(errors[start : start + number].t(), factor[first + start : at, at], alpha=-1)
            after = change(number, column)
            errors[start + number] = (column - after) / pivots[at]
            column.copy_(after)
    return errors

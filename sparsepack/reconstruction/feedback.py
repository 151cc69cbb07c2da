"""Column by column: what changing a column does to the outputs is put right by the columns that come after it.

The loop of SparseGPT (Frantar and Alistarh, 2023) and GPTQ (Frantar et al., 2022), which differ in what becomes of a
column. With U of the inputs' inverse products U^T U, an error in column j, divided by U_jj, times row j of U is taken
off the columns behind. Within a block of columns that is done at once, for the columns behind the block in one product.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsepack.reconstruction.inputs import Inputs

BLOCK = 128
"""The corrections of this many columns are put off for the columns behind them; the number is rounded down to whole
groups, one at least."""

Change = Callable[[int, Tensor], Tensor]
"""The function takes (number of a column in its group, the column float32 [rows]) and returns what becomes of it."""

Begin = Callable[[int, Tensor], Change]
"""The function takes (number of a group's first column, the group as it then is, float32 [rows, columns of the group])
and returns what changes its columns, one after the other."""


def fed_back(weight: Tensor, inputs: Inputs, begin: Begin, group: int = 1) -> Tensor:
    """float32 [rows, columns], overwritten -> its columns as `begin` would have them.

    group -- columns that are begun together; the last group may be shorter

    Raises `SingularError` as `Inputs.inverse_factor`.
    """
    factor = inputs.inverse_factor
    pivots = factor.diagonal()
    columns = weight.shape[1]
    step = max(BLOCK // group, 1) * group
    for first in range(0, columns, step):
        last = min(first + step, columns)
        block, of_block = weight[:, first:last].clone(), factor[first:last, first:last]
        errors = torch.empty_like(block)
        for column in range(last - first):
            if column % group == 0:
                change = begin(first + column, block[:, column : column + group])
            before = block[:, column].clone()
            block[:, column] = change(column % group, before)
            errors[:, column] = (before - block[:, column]) / pivots[first + column]
            if column + 1 < last - first:
                block[:, column + 1 :].addr_(errors[:, column], of_block[column, column + 1 :], alpha=-1)
        weight[:, first:last] = block
        if last < columns:
            weight[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return weight

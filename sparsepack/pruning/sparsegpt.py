"""SparseGPT: the weights that stay make up for those that go, as far as the inputs allow (Frantar and Alistarh, 2023).

Columns are worked off from the first to the last. What leaving out a weight does to the output is put right by the
weights of the columns that come after it, by the inverse of the inputs' products. Which weights of a group stay is
decided when its first column is reached, after all corrections that came before; groups lie on one grid over the whole
matrix, and blocks of columns hold whole groups.
"""

import torch
from torch import Tensor

from sparsepack.models.records.groups import kept
from sparsepack.models.records.pattern import Pattern
from sparsepack.pruning.inputs import Inputs

BLOCK = 128
"""The corrections of this many columns are put off for the columns behind them; the number is rounded down to whole
groups."""


def values(weight: Tensor, inputs: Inputs) -> Tensor:
    """What leaving out a weight adds to the squared error where all other weights make up for it: [rows, columns]."""
    factor = inputs.inverse_factor
    damage = weight.square() / factor.square().sum(0)  # the diagonal of U^T U
    return damage.masked_fill(inputs.dead, 0)


def prune(weight: Tensor, inputs: Inputs, pattern: Pattern) -> Tensor:
    """float32 [rows, columns] -> the same with `pattern`, the weights that stay corrected."""
    weight = weight.masked_fill(inputs.dead, 0)
    factor = inputs.inverse_factor
    pivots = factor.diagonal()
    columns = weight.shape[1]
    step = BLOCK // pattern.of * pattern.of
    for first in range(0, columns, step):
        last = min(first + step, columns)
        block, of_block = weight[:, first:last].clone(), factor[first:last, first:last]
        errors = torch.empty_like(block)
        for column in range(last - first):
            if column % pattern.of == 0:
                group = slice(column, min(column + pattern.of, last - first))
                scores = (block[:, group] / pivots[first:last][group]).square()
                stays = kept(scores, pattern)
            before = block[:, column].clone()
            block[:, column] *= stays[:, column % pattern.of]
            errors[:, column] = (before - block[:, column]) / pivots[first + column]
            if column + 1 < last - first:
                block[:, column + 1 :].addr_(errors[:, column], of_block[column, column + 1 :], alpha=-1)
        weight[:, first:last] = block
        if last < columns:
            weight[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return weight

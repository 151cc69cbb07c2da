"""SparseGPT: the weights that stay make up for those that go, as far as the inputs allow (Frantar and Alistarh, 2023).

Which weights of a group stay is decided when its first column is reached, after all corrections that came before;
groups lie on one grid over the whole matrix.
"""

from torch import Tensor

from sparsepack.by_triton import by_triton
from sparsepack.models.records.groups import kept
from sparsepack.models.records.pattern import Pattern
from sparsepack.reconstruction.feedback import Change, fed_back
from sparsepack.reconstruction.inputs import Inputs

WITHOUT = "weights are pruned by plain torch, many times slower"


def values(weight: Tensor, inputs: Inputs) -> Tensor:
    """What leaving out a weight adds to the squared error where all other weights make up for it: [rows, columns]."""
    factor = inputs.inverse_factor
    damage = weight.square() / factor.square().sum(0)  # the diagonal of U^T U
    return damage.masked_fill(inputs.dead, 0)


def prune(weight: Tensor, inputs: Inputs, pattern: Pattern) -> Tensor:
    """float32 [rows, columns] -> the same with `pattern`, the weights that stay corrected."""
    pivots = inputs.inverse_factor.diagonal()

    def begin(first: int, group: Tensor) -> Change:
        stays = kept((group / pivots[first : first + group.shape[1]]).square(), pattern)
        return lambda number, column: column * stays[:, number]

    def at_once(block: Tensor, factor: Tensor, first: int) -> Tensor | None:
        def by_kernel() -> Tensor:
            from sparsepack.pruning.sparsegpt_triton import prune_block

            return prune_block(block, factor, first, pattern)

        return by_triton(block, by_kernel, WITHOUT)

    return fed_back(weight.masked_fill(inputs.dead, 0), inputs, begin, pattern.of, at_once)

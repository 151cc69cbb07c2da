"""The methods, a row each: what they must know of a matrix's inputs, what each weight is worth, what stays of them.

SparseGPT: the weights that stay make up for those that go, as far as the inputs allow (Frantar and Alistarh, 2023).

Which weights of a group stay is decided when its first column is reached, after all corrections that came before;
groups lie on one grid over the whole matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsepack.models.pattern import Pattern, kept
from sparsepack.reconstruction import Change, Inputs, fed_back
from sparsepack.triton_kernels import run_triton

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
            from sparsepack.calibrate.sparsegpt_triton import prune_block

            return prune_block(block, factor, first, pattern)

        return run_triton(block, by_kernel, WITHOUT)

    return fed_back(weight.masked_fill(inputs.dead, 0), inputs, begin, pattern.of, at_once)


Values = Callable[[Tensor, Inputs], Tensor]
"""The function takes (weight float32 [rows, columns], its inputs) and returns float32 [rows, columns]: what leaving out
each weight alone adds to the squared error, at least 0, and in a method that corrects other weights what leaving it out
adds after the correction."""


@dataclass(frozen=True)
class Method:
    """A way to prune a matrix.

    needs -- what it must know of the inputs: nothing; each one's second moment; their products with each other
    values -- of the weights
    prune -- (weight float32 [rows, columns], inputs, pattern) -> the weights that stay, zeros in place of the others
    """

    needs: Literal["nothing", "moments", "products"]
    values: Values
    prune: Callable[[Tensor, Inputs, Pattern], Tensor]


def _masked(values: Values) -> Callable[[Tensor, Inputs, Pattern], Tensor]:
    """Keep the weights of the highest values as they are."""
    return lambda weight, inputs, pattern: torch.where(kept(values(weight, inputs), pattern), weight, 0)


def _magnitude(weight: Tensor, inputs: Inputs) -> Tensor:
    return weight.square()


def _wanda(weight: Tensor, inputs: Inputs) -> Tensor:
    return weight.square() * inputs.moments


METHODS: Mapping[str, Method] = {
    "magnitude": Method("nothing", _magnitude, _masked(_magnitude)),
    "wanda": Method("moments", _wanda, _masked(_wanda)),
    "sparsegpt": Method("products", values, prune),
}
"""Each method stands under its name; `options.METHODS` lists the names."""

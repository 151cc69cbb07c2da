"""The methods, a row each: what they must know of a matrix's inputs, what each weight is worth, what stays of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsepack.models.records.groups import kept
from sparsepack.models.records.pattern import Pattern
from sparsepack.pruning import sparsegpt
from sparsepack.reconstruction.inputs import Inputs

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
    "sparsegpt": Method("products", sparsegpt.values, sparsegpt.prune),
}
"""Each method stands under its name; `options.METHODS` lists the names."""

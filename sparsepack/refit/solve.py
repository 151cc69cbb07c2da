"""New weights of one matrix, in closed form: what of W x the sparse inputs x~ can still give.

W' minimises E|W' x~ - W x|^2 + lambda |W' - W|^2, with lambda the damping times the mean of E[x~_j^2]:

    W' = W + W E[e x~^T] (E[x~ x~^T] + lambda)^-1,   e = x - x~

A matrix whose inputs are not skipped stays as it is. For any other W'', and so for a quantised one, the sum is that of
W' plus tr((W'' - W') (E[x~ x~^T] + lambda) (W'' - W')^T): GPTQ with the same products goes on where this ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsepack.refit.inputs import SiteInputs


@dataclass(frozen=True)
class FittedSite:
    """The matrices of a site, as they are stored.

    tensors -- their bytes, by the names of the artifact's tensors: uint8, of experts [experts, ...]
    decoded -- what they decode to, by the names that the tensors of the transformers model have within the block
    changes -- of the weights, relative, by the names of the stored tensors
    before  -- relative error of the outputs, were the weights rounded to nearest
    after   -- the same of what is stored
    """

    tensors: Mapping[str, Tensor]
    decoded: Mapping[str, Tensor]
    changes: Mapping[str, float]
    before: float
    after: float


def refitted(weight: Tensor, known: SiteInputs) -> Tensor:
    """float32 [rows, columns] -> new weights of the same shape. Raises `SingularError` as `Inputs.inverse_factor`."""
    if known.lost is None:
        return weight
    order, inputs = known.inputs.by_size  # as quantising will take them, so that the inverse is made once
    factor = inputs.inverse_factor
    found = weight.clone()
    found[:, order] += known.lost[:, order] @ factor.t() @ factor
    return found

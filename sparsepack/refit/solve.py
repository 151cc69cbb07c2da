"""New weights of one matrix, in closed form: what of W x the sparse inputs x~ can still give.

W' minimises E|W' x~ - W x|^2 + lambda |W' - W|^2, with lambda the damping times the mean of E[x~_j^2]:

    W' = W + W E[e x~^T] (E[x~ x~^T] + lambda)^-1,   e = x - x~

A matrix whose inputs are not skipped stays as it is. For any other W'', and so for a quantised one, the sum is that of
W' plus tr((W'' - W') (E[x~ x~^T] + lambda) (W'' - W')^T): GPTQ with the same products goes on where this ends.
"""

from torch import Tensor

from sparsepack.refit.inputs import SiteInputs


def refitted(weight: Tensor, known: SiteInputs) -> Tensor:
    """float32 [rows, columns] -> new weights of the same shape. Raises `SingularError` as `Inputs.inverse_factor`."""
    if known.lost is None:
        return weight
    order, inputs = known.inputs.by_size  # as quantising will take them, so that the inverse is made once
    factor = inputs.inverse_factor
    found = weight.clone()
    found[:, order] += known.lost[:, order] @ factor.t() @ factor
    return found

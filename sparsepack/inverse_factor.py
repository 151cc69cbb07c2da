"""The factor by which errors are fed back, from the products of a matrix's inputs.

U is upper triangular, of the inverse U^T U of products H = R R^T with R upper triangular: Cholesky's factor from the
last input to the first, U = R^-1. Of 8192 inputs each of these matrices has 268 MB, and memory that a system gives anew
costs more than most of what is computed with it. So all steps but the first take place in one matrix:

    products of the inputs from the last to the first (`permuted`)
    -> Cholesky's factor L, in LAPACK's order of columns -> L^-1, by halves -> U, which mirrors it in the other diagonal
"""

import torch
from torch import Tensor

from sparsepack.errors import SingularError
from sparsepack.formats.blocks.cpu_encoder import kernels

FLOOR = 0.001
"""Share of the mean moment that shrunk products get as well: some inputs are nearly never there."""
_SOLVED = 256
"""A triangular matrix of so many rows is inverted at once."""


def symmetric_means(products: Tensor, tokens: float) -> Tensor:
    """Sums of products of which what lies above the diagonal is known, over so many tokens -> the means, whole: float32
    [columns, columns]. On a CPU they take the place of the sums."""
    found = kernels() if products.device.type == "cpu" else None
    if found is None:
        return (products.triu() + products.triu(1).t()) / tokens
    found.mirror(products.numpy(), tokens, torch.get_num_threads())
    return products


def permuted(products: Tensor, order: Tensor) -> Tensor:
    """Those rows and columns of a square matrix, in that order: float32 [columns, columns] -> [n, n], in new memory.

    order -- int64 [n]
    """
    found = kernels() if products.device.type == "cpu" else None
    if found is None:
        return products[order][:, order]
    made = torch.empty(len(order), len(order))
    found.permute(products.contiguous().numpy(), order.contiguous().numpy(), made.numpy(), torch.get_num_threads())
    return made


def transposed(weight: Tensor, order: Tensor) -> Tensor:
    """The columns of a matrix in another order, int64 [columns], each in one piece: float32 [rows, columns] ->
    [columns, rows], in new memory."""
    found = kernels() if weight.device.type == "cpu" else None
    if found is None:
        return weight[:, order].t().clone(memory_format=torch.contiguous_format)
    made = torch.empty(weight.shape[1], len(weight))
    found.transpose_columns(
        weight.contiguous().numpy(), order.contiguous().numpy(), made.numpy(), torch.get_num_threads()
    )
    return made


def inverse_factor(products: Tensor, order: Tensor, damping: float, shrunk: bool) -> Tensor:
    """U of the inputs in an order: float32 [columns, columns].

    damping, shrunk -- of `Inputs`

    An input that never differs from zero counts as independent of all others. Raises `SingularError` where the products
    have no inverse even so.
    """
    hessian = permuted(products, order.flip(0))
    diagonal = hessian.diagonal()
    dead, mean = diagonal == 0, diagonal.mean()
    added = damping * diagonal + FLOOR * mean if shrunk else damping * mean
    diagonal += torch.where(dead, 1.0, added)
    lower, failed = hessian.t(), torch.empty((), dtype=torch.int32, device=hessian.device)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    if failed:
        raise SingularError(f"the products of {len(diagonal)} inputs have no inverse with damping {damping:g}")
    half = len(lower) // 2
    _invert(lower, lower.new_empty(half * (len(lower) - half)))
    found = kernels() if hessian.device.type == "cpu" else None
    if found is None:
        return lower.flip(0, 1).contiguous()
    found.flip_diagonal(hessian.numpy(), torch.get_num_threads())
    return hessian


def _invert(lower: Tensor, scratch: Tensor) -> None:
    """Invert a lower triangular matrix in its place, by halves: solving for the columns of the identity takes three
    times the arithmetic, since it does not know that they are mostly zeros.

    scratch -- as many numbers as the largest of the four quarters has
    """
    size = len(lower)
    if size <= _SOLVED:
        lower.copy_(torch.linalg.solve_triangular(lower, torch.eye(size, device=lower.device), upper=False))
        return
    half = size // 2
    first, below, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    _invert(first, scratch)
    _invert(last, scratch)
    product = scratch[: below.numel()].view(below.shape)
    torch.mm(below, first, out=product)
    torch.mm(last, product, out=below).neg_()

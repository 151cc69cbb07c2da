"""The basis of a rotated model, found from its embedding and that of the model it was made from.

The embedding is E in one and E Q in the other, quantised perhaps. Of all orthogonal matrices the one that brings E
nearest to what is stored is U V^T, with U S V^T the singular values and vectors of E^T (E Q) (orthogonal Procrustes,
Schoenemann 1966). With E the identity that is the orthogonal matrix nearest to a stored one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FoundBasis:
    """An orthogonal matrix that was found.

    basis       -- float64 [hidden, hidden]
    residual    -- of the embedding in that basis: its difference from what is stored, over what is stored
    uncertainty -- by how much the basis itself may be off, relative: infinite where the embedding does not say
    """

    basis: Tensor
    residual: float
    uncertainty: float


def found_basis(pairs: Iterable[tuple[Tensor, Tensor]]) -> FoundBasis:
    """The basis, from pairs of the same rows [N, hidden] of the embedding and of what is stored."""
    products: Tensor | None = None
    own = stored = 0.0
    rows = 0
    for before, after in pairs:
        one, other = before.double(), after.double()
        product = one.t() @ other
        products = product if products is None else products.add_(product)
        own += float(one.square().sum())
        stored += float(other.square().sum())
        rows += len(one)
    assert products is not None
    if not torch.isfinite(products).all():
        return FoundBasis(torch.eye(len(products)).double(), math.inf, math.inf)
    left, sizes, right = torch.linalg.svd(products)
    squares = max(own + stored - 2 * float(sizes.sum()), 0.0)
    residual = math.sqrt(squares / stored) if stored else math.inf
    # The basis itself takes in a part of the mistakes: so many numbers of them as an orthogonal matrix has.
    left_over = rows * len(sizes) - len(sizes) * (len(sizes) - 1) // 2
    return FoundBasis(left @ right, residual, _uncertainty(sizes, squares / max(left_over, 1)))


def _uncertainty(sizes: Tensor, variance: float) -> float:
    """How far the basis is off, relative, where every stored number is off by a mistake of that variance of its own.

    A small turn in the plane of two directions i, j changes what they carry by the mistakes along them: its variance is
    variance / (sizes_i + sizes_j), of sizes that are the squared singular values of the embedding.
    """
    hidden = len(sizes)
    if float(sizes[-1]) <= torch.finfo(sizes.dtype).eps * hidden * float(sizes[0]):
        return math.inf  # directions that the embedding does not have
    turns = float((1 / (sizes[:, None] + sizes[None])).sum())
    return math.sqrt(variance * turns / hidden)

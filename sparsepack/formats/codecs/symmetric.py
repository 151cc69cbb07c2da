"""Symmetric quantisation of rows: one scale each, zero stays zero (SlideSparse, 4.2).

scale = largest |x| of the row / STEPS          q = x / scale, rounded to the type          x ~ scale * q
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.codecs.value_types import VALUE_TYPES

STEPS: Mapping[torch.dtype, float] = {
    row.dtype: row.steps for row in reversed([*VALUE_TYPES.values()]) if row.steps is not None
}
"""The largest value of a row becomes this number unless told otherwise, by the type that the row is quantised to: where
several types of slid values have that one of torch's, the number of the first."""

SMALLEST = 1e-30
"""A row of smaller values counts as zeros: its scale's reciprocal would leave float32."""


def quantise_rows(x: Tensor, dtype: torch.dtype, steps: float | None = None) -> tuple[Tensor, Tensor]:
    """float32, float16 or bfloat16 [..., K] -> q, `dtype` [..., K], and scale, float32 [...].

    steps -- what the largest value of a row becomes; None: as `STEPS` says

    Computed in float32; nearest, ties to even. A row of zeros has scale 0. Raises `PackingError` for values that are
    not finite.
    """
    values = x.float()
    scale, inverse = scales(values, STEPS[dtype] if steps is None else steps)
    q = values * inverse[..., None]  # beyond the steps by a rounding of float32 at most, which that of the type undoes
    return (q if dtype.is_floating_point else q.round_()).to(dtype), scale


def scales(values: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """The scales that make `steps` of the largest values of float32 rows [..., K], and their reciprocals: [...] each.

    Raises `PackingError` for values that are not finite.
    """
    largest = values.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise PackingError("a value is not finite; it cannot be quantised")
    # A tensor: of a Python number and a tensor torch makes a product with a reciprocal, which rounds twice.
    most = largest.new_tensor(steps)
    held = largest > SMALLEST
    return torch.where(held, largest / most, 0), torch.where(held, most / largest, 0)


def dequantised(q: Tensor, scale: Tensor) -> Tensor:
    """What q [..., K] and scale [...] stand for: float32 [..., K]."""
    return q.float() * scale[..., None]

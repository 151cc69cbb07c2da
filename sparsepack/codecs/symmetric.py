"""Symmetric quantisation of rows: one scale each, zero stays zero (SlideSparse, 4.2).

scale = largest |x| of the row / STEPS          q = x / scale, rounded to the type          x ~ scale * q
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepack.errors import PackingError

STEPS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest value of a row becomes, by the type that it is quantised to."""

SMALLEST = 1e-30
"""A row of smaller values counts as zeros: its scale's reciprocal would leave float32."""


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32, float16 or bfloat16 [..., K] -> q, `dtype` [..., K], and scale, float32 [...].

    Computed in float32; nearest, ties to even. A row of zeros has scale 0. Raises `PackingError` for values that are
    not finite.
    """
    values = x.float()
    largest = values.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise PackingError("a value is not finite; it cannot be quantised")
    # A tensor: of a Python number and a tensor torch makes a product with a reciprocal, which rounds twice.
    steps = largest.new_tensor(STEPS[dtype])
    inverse = torch.where(largest > SMALLEST, steps / largest, 0)
    q = values * inverse[..., None]  # beyond the steps by a rounding of float32 at most, which that of the type undoes
    scale = torch.where(largest > SMALLEST, largest / steps, 0)
    return (q.round_() if dtype == torch.int8 else q).to(dtype), scale


def dequantised(q: Tensor, scale: Tensor) -> Tensor:
    """What q [..., K] and scale [...] stand for: float32 [..., K]."""
    return q.float() * scale[..., None]

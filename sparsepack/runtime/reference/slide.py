"""The oracle of products with slid weights: plain torch, on any device, written to be right and read.

Integers are multiplied and added exactly; FP8 and bfloat16 values are multiplied in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.formats.codecs.slide import Slide, lift, unpack_positions, windowed
from sparsepack.formats.codecs.symmetric import STEPS, quantise_rows

_EXACT = 1024
"""Float32 adds products of int8 of this many columns without rounding: 1024 * 127 ** 2 is below 2 ** 24."""


@dataclass(frozen=True, eq=False)
class SlidMatrix:
    """A matrix as it lies in a slid folder.

    values    -- int8, float8_e4m3fn or bfloat16 [rows, stored]
    positions -- uint8 [rows, stored / 4 rounded up], two bits each
    scale     -- float32 [rows]; None where the values are the weights themselves
    """

    values: Tensor
    positions: Tensor
    scale: Tensor | None
    how: Slide
    columns: int


def quantise_slide(x: Tensor, how: Slide, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Quantise inputs token by token and lift them (SlideSparse, 4.2).

    x: floating [tokens, columns]. Returns the lifted values, `dtype` [tokens, lifted], and the scales, float32
    [tokens]; None for a type that is not quantised to. Raises `PackingError` for inputs that are not finite.
    """
    if dtype not in STEPS:
        return lift(x.to(dtype), how), None
    q, scale = quantise_rows(x, dtype)
    # One byte is like another where values only change places.
    return lift(q.view(torch.uint8), how).contiguous().view(dtype), scale


def slide_matmul(matrix: SlidMatrix, q: Tensor, scale: Tensor | None) -> Tensor:
    """Y = X W^T of lifted inputs: `quantise_slide`'s [tokens, lifted] and [tokens] -> float32 [tokens, rows]."""
    stored = matrix.values.shape[1]
    positions = unpack_positions(matrix.positions, stored, matrix.how)
    weight = windowed(matrix.values.float(), positions, matrix.how)
    sums = torch.zeros(len(q), len(weight), dtype=torch.float64, device=q.device)
    for first in range(0, weight.shape[1], _EXACT):
        part = slice(first, first + _EXACT)
        sums += q[:, part].float() @ weight[:, part].t()
    if scale is not None and matrix.scale is not None:
        sums *= scale[:, None].double() * matrix.scale.double()
    return sums.float()

"""A Linear with slid weights, for stock transformers models."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsepack.codecs.slide import Slide
from sparsepack.runtime.slide.reference import SlidMatrix, quantise_slide, slide_matmul

VALUES: Mapping[str, torch.dtype] = {
    "slide-int8": torch.int8,
    "slide-fp8": torch.float8_e4m3fn,
    "slide-bf16": torch.bfloat16,
}
"""The type of the values, by the format's name."""


class SlidLinear(nn.Module):
    """y = x W^T + bias, with W as it lies in a slid folder (`artifacts.folder.slid`).

    weight           -- the slid values: int8, float8_e4m3fn or bfloat16 [rows, stored]
    weight_positions -- uint8 [rows, stored / 4 rounded up]
    weight_scale     -- float32 [rows]; None for bfloat16
    bias             -- [rows], or None

    Inputs [..., columns] are quantised token by token to the values' type, outputs have the inputs' type.
    """

    def __init__(
        self, columns: int, rows: int, how: Slide, dtype: torch.dtype, bias: bool, of: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.how = columns, rows, how
        stored = how.stored(columns)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = parameter(rows, stored, dtype=dtype)
        self.weight_positions = parameter(rows, -(-stored // 4), dtype=torch.uint8)
        self.weight_scale = None if dtype == torch.bfloat16 else parameter(rows, dtype=torch.float32)
        self.bias = parameter(rows, dtype=of) if bias else None

    @classmethod
    def in_place_of(cls, linear: nn.Linear, how: Slide, dtype: torch.dtype) -> "SlidLinear":
        """One of the same shape, bias and device, without weights yet."""
        weight, bias = linear.weight, linear.bias is not None
        return cls(linear.in_features, linear.out_features, how, dtype, bias, weight.dtype, weight.device)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.how.pattern}, {self.weight.dtype}"

    @property
    def matrix(self) -> SlidMatrix:
        """The weights as the operations take them."""
        return SlidMatrix(self.weight, self.weight_positions, self.weight_scale, self.how, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        q, scale = quantise_slide(x.flatten(0, -2), self.how, self.weight.dtype)
        y = slide_matmul(self.matrix, q, scale)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

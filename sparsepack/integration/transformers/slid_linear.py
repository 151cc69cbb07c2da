"""A Linear with slid weights, for stock transformers models."""

from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.formats.codecs.slide import STEPS, Slide
from sparsepack.runtime.reference.products import SlidMatrix
from sparsepack.runtime.slid_operator import prepare, slid_linear


class SlidLinear(nn.Module):
    """y = x W^T + bias, with W as it lies in a slid folder (`formats.slid.artifact`).

    weight           -- the slid values: int8, float8_e4m3fn or bfloat16 [rows, stored]
    weight_positions -- uint8 [rows, stored / 4 rounded up]
    weight_scale     -- float32 [rows]; None for bfloat16
    bias             -- [rows], or None

    Inputs [..., columns] are quantised token by token to the values' type, outputs have the inputs' type. See
    `runtime.slid_operator`, which computes it and has no gradients.
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
        self.weight_scale = parameter(rows, dtype=torch.float32) if dtype in STEPS else None
        self.bias = parameter(rows, dtype=of) if bias else None
        self._prepared_for: Any = None
        self._prepared: list[Tensor] = []

    @classmethod
    def in_place_of(cls, linear: nn.Linear, how: Slide, dtype: torch.dtype) -> "SlidLinear":
        """One of the same shape, bias and device, without weights yet."""
        weight, bias = linear.weight, linear.bias is not None
        return cls(linear.in_features, linear.out_features, how, dtype, bias, weight.dtype, weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "SlidLinear":
        """Weights and scales move, but are never cast: their types are the format's."""
        self._forget()

        def moved(t: Tensor) -> Tensor:
            found: Tensor = fn(t) if t is self.bias else fn(t.view(torch.uint8)).view(t.dtype)
            return found

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *given: Any, **settings: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*given, **settings)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared_for": None, "_prepared": []}  # a copy's weights lie elsewhere

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.how.pattern}, {self.weight.dtype}"

    @property
    def matrix(self) -> SlidMatrix:
        """The weights as the operations take them."""
        return SlidMatrix(self.weight, self.weight_positions, self.weight_scale, self.how, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features or x.device != self.weight.device:
            wanted = f"[..., {self.in_features}] on {self.weight.device}"
            raise ValueError(f"inputs {list(x.shape)} on {x.device}; expected {wanted}")
        self._prepare(x.dtype)
        return slid_linear(x, self.matrix, self.bias, self._prepared)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _prepare(self, dtype: torch.dtype) -> bool:
        """The weights are prepared when the first inputs come, and again once they lie elsewhere. Compilers call it
        while they compile; from then on they watch what `_prepared` is."""
        lies = (dtype, self.weight.device, self.weight.data_ptr(), self.weight_positions.data_ptr())
        if self._prepared_for != lies:
            self._forget()  # its memory is free before more is taken
            self._prepared = prepare(self.matrix, dtype)
            self._prepared_for = lies
        return True

    def _forget(self) -> None:
        self._prepared_for, self._prepared = None, []

"""A Linear with slid weights, for stock transformers models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.codecs.symmetric import STEPS
from sparsepack.runtime.reference.slide import SlidMatrix, quantise_slide, slide_matmul


class SlidLinear(nn.Module):
    """y = x W^T + bias, with W as it lies in a slid folder (`formats.slid.layout`).

    weight           -- the slid values: int8, float8_e4m3fn or bfloat16 [rows, stored]
    weight_positions -- uint8 [rows, stored / 4 rounded up]
    weight_scale     -- float32 [rows]; None for bfloat16
    bias             -- [rows], or None

    Inputs [..., columns] are quantised token by token to the values' type, outputs have the inputs' type. NVIDIA GPUs
    have kernels (`runtime.cuda.slide`), other devices the reference. Neither has gradients.
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
        self._prepared: tuple[Any, Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def in_place_of(cls, linear: nn.Linear, how: Slide, dtype: torch.dtype) -> "SlidLinear":
        """One of the same shape, bias and device, without weights yet."""
        weight, bias = linear.weight, linear.bias is not None
        return cls(linear.in_features, linear.out_features, how, dtype, bias, weight.dtype, weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "SlidLinear":
        """Weights and scales move, but are never cast: their types are the format's."""
        self._prepared = None

        def moved(t: Tensor) -> Tensor:
            found: Tensor = fn(t) if t is self.bias else fn(t.view(torch.uint8)).view(t.dtype)
            return found

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *given: Any, **settings: Any) -> None:
        self._prepared = None
        super()._load_from_state_dict(*given, **settings)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}  # it can neither be pickled nor serve a copy

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
        inputs = x.reshape(-1, self.in_features)
        y = self._on_gpu(inputs) if x.is_cuda else self._by_reference(inputs)
        return y.view(*x.shape[:-1], self.out_features)

    def _by_reference(self, x: Tensor) -> Tensor:
        q, scale = quantise_slide(x, self.how, self.weight.dtype)
        y = slide_matmul(self.matrix, q, scale)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_gpu(self, x: Tensor) -> Tensor:
        """The weights are prepared when the first inputs come, and again once they lie elsewhere."""
        key = (x.dtype, *(t.data_ptr() for t in (self.weight, self.weight_positions)))
        with torch.cuda.device(x.device):  # kernels run on the current one
            return self._prepared_for(key, x.dtype)(x.contiguous())

    def _prepared_for(self, key: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        prepared = self._prepared
        if prepared is None or prepared[0] != key:
            from sparsepack.runtime.cuda.slide.product import slid_product

            self._prepared = prepared = None  # its memory is free before more is taken
            # What is made here serves calls in inference mode and outside of it.
            with torch.inference_mode(False), torch.no_grad():
                prepared = (key, slid_product(self.matrix, self.bias, dtype))
            self._prepared = prepared
        return prepared[1]

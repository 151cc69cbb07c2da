"""LFM2's short convolutions on the GPU (`kernels/attention/short_conv.cu`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels

THREADS, ROWS = 256, 16
"""A block has so many channels, and of a prefill so many positions."""


@dataclass(frozen=True)
class ShortConvParameters:
    """A block's short convolution, and what it keeps of B sequences: a `states.Mixer`.

    taps   -- float32 [channels, taps]
    inputs -- float32 [B, taps, channels]: the convolution's at position p lies at p modulo taps
    """

    taps: Tensor
    inputs: Tensor

    @property
    def channels(self) -> int:
        return len(self.taps)

    @property
    def defines(self) -> tuple[str, ...]:
        return (f"TAPS={self.taps.shape[1]}",)

    def step(
        self, kernels: Kernels, rows: Tensor, x: Input, positions: Tensor, out: Tensor, *, flag_in_data: bool
    ) -> None:
        kernels.short_conv_step(self, rows, positions, out, flag_in_data=flag_in_data)

    def prefill(
        self, kernels: Kernels, rows: Product, x: ScaledFp16, first: int, sequence: int, counted: Tensor | None
    ) -> Tensor:
        return kernels.short_conv_prefill(self, rows, first, sequence, counted)

    def copy(self, source: int, to: int) -> None:
        self.inputs[to].copy_(self.inputs[source])


def short_conv_parameters(of: Mapping[str, Tensor], sequences: int, device: torch.device) -> ShortConvParameters:
    """A block's short convolution on a GPU, with room for its inputs. of: `PackedLayer.delta_net`.

    Raises `UserError` for more taps than the kernels know.
    """
    taps = of["short_conv"].to(device, torch.float32).contiguous()
    channels, count = taps.shape
    if count > ROWS:
        raise UserError(
            f"short convolutions over {count} positions: the cuda backend runs up to {ROWS}; use the reference backend"
        )
    return ShortConvParameters(taps, torch.zeros(sequences, count, channels, device=device))


def short_conv_step(
    of: ShortConvParameters, rows: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    """Put a short convolution of one new position per sequence on the current stream.

    rows         -- float32 [B, 3 channels]: what attn_in left
    positions    -- int32 [B], as `attention.attend` takes them; those at 0 begin with zeros
    out          -- float32 [B, channels]
    flag_in_data -- rows are in words of `driver/memory.py`: read as soon as they are stored; out may be read so in any
                    case

    Raises `ValueError` for shapes that do not fit.
    """
    sequences = len(of.inputs)
    for name, tensor, width in (("rows", rows, 3 * of.channels), ("out", out, of.channels)):
        if tensor.numel() != sequences * width or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)}: expected contiguous {[sequences, width]}")
    launch(
        kernel(
            "short_conv",
            "short_conv_step",
            (*of.defines, f"FLAG_IN_DATA={int(flag_in_data)}"),
            rows.device.index or 0,
        ),
        (-(-of.channels // THREADS), sequences),
        THREADS,
        *(rows, of.channels, of.taps, positions, of.inputs, out),
    )


def short_conv_prefill(
    of: ShortConvParameters, rows: Product, first: int, sequence: int = 0, counted: Tensor | None = None
) -> Tensor:
    """A short convolution of the positions first .. first + S - 1 of a sequence.

    rows    -- [S, 3 channels]: what attn_in gives
    counted -- int32 [1]: so many of them count, and the inputs kept are those of the last of these; None: all

    Returns float32 [S, channels].
    """
    count, device = len(rows.sums), rows.sums.device
    out = torch.empty(count, of.channels, device=device)
    if count:
        launch(
            kernel("short_conv", "short_conv_prefill", of.defines, device.index or 0),
            (-(-of.channels // THREADS), -(-count // ROWS)),
            THREADS,
            *(rows.sums, rows.factor, rows.inverse, rows.bias),
            *(of.channels, of.taps, of.inputs[sequence], first, count, counted, out),
        )
    return out

"""The scales and the bias of a product that a library made, in one kernel (`kernels/slide/scale_outputs.cu`)."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch

_SUMS = {torch.int32: 0, torch.float32: 1, torch.bfloat16: 2}
_OUTPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ROWS = 1024
"""A block has this many rows."""


def scale_outputs(
    sums: Tensor,
    tokens: int,
    rows: int,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """y = sums * x_scale * w_scale + bias, on the current stream.

    sums    -- int32, float32 or bfloat16 [tokens or more, rows or more], contiguous
    x_scale -- float32 [tokens]; None: 1
    w_scale -- float32 [rows]; None: 1
    bias    -- of the type `out` [rows], or None
    out     -- float32, float16 or bfloat16

    Returns [tokens, rows].
    """
    y = torch.empty(tokens, rows, dtype=out, device=sums.device)
    if tokens:
        launch(
            kernel("scale_outputs", "scale_outputs", _defines(sums.dtype, out), sums.device.index or 0),
            (tokens, -(-rows // _ROWS)),
            256,
            *(sums, sums.shape[1], x_scale, w_scale, bias, y, rows),
        )
    return y


def _defines(sums: torch.dtype, out: torch.dtype) -> tuple[str, str]:
    return f"SUMS={_SUMS[sums]}", f"OUTPUT={_OUTPUTS[out]}"

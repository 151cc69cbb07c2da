"""Lists and counts of active columns, and gates, as kernels of their own (`kernels/collect.cu`)."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import kernel, launch

CHUNK = 256  # columns that are counted together


def collect(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """List the active columns of an input vector; see `reference.collect`.

    x         -- float32 [columns], contiguous
    threshold -- float32 [1] or [columns], contiguous
    """
    indices = torch.empty(len(x), dtype=torch.int32, device=x.device)
    count = torch.empty((), dtype=torch.int32, device=x.device)
    launch(
        kernel("collect", "collect", (), x.device.index or 0),
        (1,),
        1024,
        *(x, len(x), threshold, int(threshold.numel() > 1), indices, count),
    )
    return indices, count


def count_active(x: Tensor, threshold: Tensor, offset: Tensor | None, counts: Tensor) -> None:
    """Put the number of active columns of each chunk of 256 on the current stream.

    x         -- float32 [columns], or [B, columns]: a column is active where it is in any of the inputs
    threshold -- float32 [1] or [columns]
    offset    -- float32 [columns], taken from every x before, or None
    counts    -- int32 [columns / 256, rounded up]: the result
    """
    columns = x.shape[-1]
    launch(
        kernel("collect", "count_active", (), x.device.index or 0),
        (len(counts),),
        CHUNK,
        *(x, x.numel() // columns, columns, threshold, int(threshold.numel() > 1), offset, counts),
    )


def gate(stacked: Tensor, activation: int, out: Tensor) -> None:
    """Put out = activation(gate) * up on the current stream.

    stacked    -- float32 [2 * width] or [B, 2 * width], gate before up
    activation -- number of the function, see `kernels/activations.cuh`
    out        -- float32 [width] or [B, width]
    """
    width = out.shape[-1]
    launch(
        kernel("collect", "gate", (), stacked.device.index or 0),
        (-(-width // CHUNK), out.numel() // width),
        CHUNK,
        *(stacked, width, activation, out),
    )


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Put out = RMSNorm(x) of every row on the current stream: float32 [B, columns], weight [columns]."""
    launch(
        kernel("collect", "norm_rows", (), x.device.index or 0),
        (len(x),),
        1024,
        *(x, x.shape[1], weight, float(eps), out),
    )

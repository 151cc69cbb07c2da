"""Lists of active columns and gates as kernels of their own (`kernels/collect.cu`)."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import kernel, launch


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


def gate(stacked: Tensor, activation: int, out: Tensor) -> None:
    """Put out = activation(gate) * up on the current stream.

    stacked    -- float32 [2 * width] or [B, 2 * width], gate before up
    activation -- number of the function, see `kernels/activations.cuh`
    out        -- float32 [width] or [B, width]
    """
    width = out.shape[-1]
    launch(
        kernel("collect", "gate", (), stacked.device.index or 0),
        (-(-width // 256), out.numel() // width),
        256,
        *(stacked, width, activation, out),
    )

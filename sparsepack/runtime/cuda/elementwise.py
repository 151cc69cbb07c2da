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

    x         -- float32 [columns]
    threshold -- float32 [1] or [columns]
    offset    -- float32 [columns], taken from x before, or None
    counts    -- int32 [columns / 256, rounded up]: the result
    """
    launch(
        kernel("collect", "count_active", (), x.device.index or 0),
        (len(counts),),
        CHUNK,
        *(x, 1, len(x), threshold, int(threshold.numel() > 1), offset, counts),
    )


def gate(stacked: Tensor, activation: int, out: Tensor) -> None:
    """Put out = activation(gate) * up on the current stream.

    stacked    -- float32 [2 * width], gate before up
    activation -- number of the function, see `kernels/activations.cuh`
    out        -- float32 [width]
    """
    launch(
        kernel("collect", "gate", (), stacked.device.index or 0),
        (-(-len(out) // CHUNK), 1),
        CHUNK,
        *(stacked, len(out), activation, out),
    )

"""Products of the residual stream with itself: the sum over tokens of x x^T, with x = h / rms(h), which is what a norm
makes of the stream h before its weights. A basis of the stream is found from them (`rotation.pca`).

The sum is over both norms of a block. So many numbers are not kept for each block of a large model: consecutive blocks
share a sum, in as many runs of blocks as `MOST_BYTES` hold, and the last block of a run has it.
"""

import torch
from torch import Tensor, nn

from sparsepack.calibration.collectors import wide
from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.kernels import parts_on

MOST_BYTES = 1 << 30
"""The sums of a whole model take at most this many bytes, unless a single one takes more."""

_BLOCKS, _LEAST = 4, 2048
"""A product is made in so many blocks of rows, on a GPU each of so many at least: less does not fill it."""


def run_count(layers: int, hidden: int) -> int:
    """How many runs of blocks have a sum of their own."""
    return max(1, min(layers, MOST_BYTES // (8 * hidden**2)))


def ends_run(layer: int, layers: int, runs: int) -> bool:
    """Whether a block is the last of its run; runs differ by one block at most."""
    return (layer + 1) * runs // layers != layer * runs // layers


def _count(stream: Tensor, eps: float) -> tuple[Tensor, ...]:
    if stream.device.type == "cuda" and stream.dtype.itemsize == 2:
        x = _normed(stream, eps).flatten(0, -2)
    else:
        h = stream.flatten(0, -2).float()
        x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    product = _gram(x)
    return (product.cpu() if product.device.type == "mps" else product,)


def _normed(stream: Tensor, eps: float) -> Tensor:
    """A GPU's stream [B, S, hidden] over its root mean square, rounded as the model's norms round it."""
    parts = parts_on(stream.device)
    made = None if parts is None else parts.norm_rows(stream, eps, None)
    return nn.functional.rms_norm(stream, stream.shape[-1:], eps=eps) if made is None else made


def _gram(x: Tensor) -> Tensor:
    """x^T x of [N, hidden], float32: the part on and above the diagonal of blocks, the rest being the same."""
    hidden = x.shape[1]
    blocks = max(1, min(_BLOCKS, hidden // _LEAST)) if x.is_cuda else _BLOCKS
    made, width = x.new_empty(hidden, hidden, dtype=torch.float32), -(-hidden // blocks)
    for first in range(0, hidden, width):
        rows = wide.product(x[:, first : first + width].t(), x[:, first:])
        made[first : first + width, first:] = rows
        made[first:, first : first + width] = rows.t()
    return made


RESIDUAL = Collector("residual", ("product",), torch.float64, (0, 0), _count, signed=True, of_runs=True)
"""The sums are float64 [hidden, hidden]."""

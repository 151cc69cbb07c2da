"""Short convolutions of the cuda backend in plain torch. Each function stands in for the one of its name."""

import torch
from simulated_launches import put_together
from simulated_words import assert_written, write
from torch import Tensor

from sparsepack.runtime.cuda.attention.short_conv import ShortConvParameters
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.reference.delta_net import causal_convolution


def short_conv_step(
    of: ShortConvParameters, rows: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    if flag_in_data:
        assert_written(rows)
    each = enumerate(zip(rows.view(len(positions), 1, -1), positions.tolist(), strict=True))
    write(out, torch.cat([mixed(of, row, here, n) for n, (row, here) in each]).view_as(out))


def short_conv_prefill(
    of: ShortConvParameters, rows: Product, first: int, sequence: int = 0, counted: Tensor | None = None
) -> Tensor:
    whole = put_together(rows.sums, rows.factor, rows.inverse, rows.bias)
    count = len(whole) if counted is None else int(counted)
    return torch.cat([mixed(of, whole[:count], first, sequence), whole.new_zeros(len(whole) - count, of.channels)])


def mixed(of: ShortConvParameters, rows: Tensor, first: int, sequence: int) -> Tensor:
    """What attn_out takes for rows [S, 3 channels]; the last inputs are kept."""
    inputs, taps = of.inputs[sequence], of.taps.shape[1]
    ring = [inputs[p % taps] if p >= 0 else torch.zeros(of.channels) for p in range(first - taps + 1, first)]
    b, c, u = rows.chunk(3, -1)
    convolved, _ = causal_convolution(b * u, torch.stack(ring) if ring else inputs[:0], of.taps)
    for s in range(max(0, len(rows) - taps), len(rows)):
        inputs[(first + s) % taps] = (b * u)[s]
    return c * convolved

"""State-space models of the cuda backend in plain torch. Each function stands in for the one of its name."""

import torch
from simulated_launches import put_together
from simulated_words import assert_written, write
from torch import Tensor
from torch.nn.functional import silu, softplus

from sparsepack.runtime.cuda.attention.mamba import MambaParameters
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.reference.delta_net import causal_convolution, state_space
from sparsepack.runtime.reference.products import rms_norm


def mamba_step(
    of: MambaParameters, rows: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    if flag_in_data:
        assert_written(rows)
    each = enumerate(zip(rows.view(len(positions), 1, -1), positions.tolist(), strict=True))
    write(out, torch.cat([mixed(of, row, here, n) for n, (row, here) in each]).view_as(out))


def mamba_prefill(
    of: MambaParameters, rows: Product, first: int, sequence: int = 0, counted: Tensor | None = None
) -> Tensor:
    whole = put_together(rows.sums, rows.factor, rows.inverse, rows.bias)
    count = len(whole) if counted is None else int(counted)
    found = mixed(of, whole[:count], first, sequence)
    return torch.cat([found, found.new_zeros(len(whole) - count, found.shape[1])])


def mixed(of: MambaParameters, rows: Tensor, first: int, sequence: int) -> Tensor:
    """What attn_out takes for rows [S, rows]; the state after them is kept."""
    m, inputs = of.mixer, of.inputs[sequence]
    gates, convolved, steps = torch.split(rows, [m.inner, m.channels, m.heads], -1)
    ring = [inputs[p % m.taps] if p >= 0 else torch.zeros(m.channels) for p in range(first - m.taps + 1, first)]
    seen, _ = causal_convolution(convolved, torch.stack(ring) if ring else inputs[:0], of.taps)
    x, b, c = torch.split(silu(seen + of.conv_bias), [m.inner, m.groups * m.state, m.groups * m.state], -1)
    x = x.unflatten(-1, (m.heads, m.head_dim))
    b, c = (each.unflatten(-1, (m.groups, m.state)).repeat_interleave(m.heads // m.groups, 1) for each in (b, c))
    state = of.state[first % 2, sequence].clone() * (first > 0)
    outputs = state_space(x, b, c, softplus(steps + of.dt_bias), of.rate, state) + of.skip[:, None] * x
    of.state[(first + len(rows)) % 2, sequence] = state
    for s in range(max(0, len(rows) - m.taps), len(rows)):
        inputs[(first + s) % m.taps] = convolved[s]
    gated = (outputs.flatten(1) * silu(gates)).unflatten(-1, (m.norms, -1))
    return rms_norm(gated, of.norm.view(m.norms, -1), of.eps).flatten(1)

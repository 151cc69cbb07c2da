"""Gated delta nets of the cuda backend in plain torch. Each function stands in for the one of its name."""

import torch
from simulated_launches import put_together
from simulated_words import assert_written, write
from torch import Tensor
from torch.nn.functional import silu, softplus

from sparsepack.runtime.cuda.attention.delta_net import DeltaNetParameters
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.delta_net import L2_EPS, causal_convolution, delta_rule


def delta_step(
    of: DeltaNetParameters, rows: Tensor, x: Input, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    if flag_in_data:
        assert_written(rows)
        if x.flag_in_data:
            assert_written(x.x)
    assert x.norm is not None
    texts = len(positions)
    normed = reference.rms_norm(x.x.view(texts, -1), x.norm, of.eps)
    each = zip(positions.tolist(), rows.view(texts, -1, of.width).unbind(), normed[:, None].unbind(), strict=True)
    write(out, torch.cat([mixed(of, *one, here, n) for n, (here, *one) in enumerate(each)]).view_as(out))


def delta_prefill(
    of: DeltaNetParameters,
    rows: Product,
    x: ScaledFp16,
    first: int,
    sequence: int = 0,
    counted: Tensor | None = None,
) -> Tensor:
    whole = put_together(rows.sums, rows.factor, rows.inverse, rows.bias)
    count = len(whole) if counted is None else int(counted)
    found = mixed(of, whole[:count], (x.values.float() * x.factor[:, None])[:count], first, sequence)
    return torch.cat([found, found.new_zeros(len(whole) - count, found.shape[1])])


def mixed(of: DeltaNetParameters, rows: Tensor, x: Tensor, first: int, sequence: int) -> Tensor:
    """What attn_out takes for rows [S, width], where attn_in takes x [S, hidden]; the state after them is kept."""
    m, inputs = of.mixer, of.inputs[sequence]
    ring = [inputs[p % m.taps] if p >= 0 else torch.zeros(m.channels) for p in range(first - m.taps + 1, first)]
    before = torch.stack(ring) if ring else inputs[:0]
    convolved, _ = causal_convolution(rows[:, : m.channels], before, of.taps)
    keys = m.key_heads * m.key_dim
    q, k, v = torch.split(silu(convolved), [keys, keys, m.values], -1)
    q, k = (x.unflatten(-1, (m.key_heads, m.key_dim)) for x in (q, k))
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(m.value_heads // m.key_heads, 1)
        for x in (q, k)
    )
    beta, alpha = (x @ of.gates.t()).chunk(2, -1)
    decay = (-of.rate * softplus(alpha + of.dt_bias)).exp()
    state = of.state[first % 2, sequence].transpose(-1, -2).clone() * (first > 0)
    by_head = v.unflatten(-1, (m.value_heads, m.value_dim))
    outputs = delta_rule(q * m.key_dim**-0.5, k, by_head, decay, beta.sigmoid(), state)
    of.state[(first + len(rows)) % 2, sequence] = state.transpose(-1, -2)
    for s in range(max(0, len(rows) - m.taps), len(rows)):
        inputs[(first + s) % m.taps] = rows[s, : m.channels]
    gates = rows[:, m.channels :].unflatten(-1, (m.value_heads, m.value_dim))
    return (reference.rms_norm(outputs, of.norm, of.eps) * silu(gates)).flatten(1)

"""The oracle's gated delta net in plain torch (Gated Delta Networks, arXiv 2412.06464): the recurrence token by token,
and the state that each sequence keeps in place of keys and values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sparsepack.errors import UserError
from sparsepack.models.blocks import DeltaNet
from sparsepack.runtime.reference.products import rms_norm

L2_EPS = 1e-6
"""Is added to the sum of a head's squares, by whose root queries and keys are divided."""


def causal_convolution(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu of a convolution of each channel over the last taps positions.

    x      -- float32 [S, channels]
    before -- the inputs before them [taps - 1, channels], the oldest first; zeros before a text
    weight -- [channels, taps], the last one is of a position itself

    Returns float32 [S, channels], and the last taps - 1 inputs.
    """
    taps = weight.shape[1]
    seen = torch.cat([before, x])
    summed = sum(seen[tap : tap + len(x)] * weight[:, tap] for tap in range(taps))
    assert isinstance(summed, Tensor)
    return silu(summed), seen[len(x) :]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The outputs S^T q of each head after S = decay S, S += k beta (v - k^T S), token by token.

    q, k        -- float32 [S, value_heads, key_dim]
    v           -- float32 [S, value_heads, value_dim]
    decay, beta -- float32 [S, value_heads]
    state       -- float32 [value_heads, key_dim, value_dim], which is changed

    Returns float32 [S, value_heads, value_dim].
    """
    outputs = torch.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, None, None]
        error = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state += k[t, :, :, None] * error[:, None]
        outputs[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return outputs


@dataclass
class _Kept:
    """What a sequence keeps of a block: state [value_heads, key_dim, value_dim] after so many tokens, and the last
    inputs of the convolution [taps - 1, channels]."""

    state: Tensor
    inputs: Tensor
    tokens: int = 0


class DeltaNetStates:
    """The states of the blocks of a model that have a gated delta net, for one sequence or several. A sequence without
    tokens begins with zeros, whatever was there.

    layers -- number of a block -> `PackedLayer.delta_net` of it, on the device that computes
    eps    -- of the norm of outputs
    """

    def __init__(self, mixer: DeltaNet, layers: Mapping[int, Mapping[str, Tensor]], eps: float, sequences: int) -> None:
        self._mixer, self._layers, self._eps = mixer, layers, eps
        self._kept = [{layer: self._zeros(layer) for layer in layers} for _ in range(sequences)]

    def mix(self, layer: int, rows: Tensor, x: Tensor, sequence: int, length: int) -> Tensor:
        """What attn_out is given for the tokens after the first `length` of a sequence; their state is kept.

        rows -- what attn_in gives: queries, keys and values of all heads, then gates of the output: [S, rows]
        x    -- what attn_in is given [S, hidden]

        Returns float32 [S, value_heads * value_dim]. Raises `UserError` where the state is not that after `length`
        tokens: it cannot forget some.
        """
        m, w = self._mixer, self._layers[layer]
        if not length:
            self._kept[sequence][layer] = self._zeros(layer)
        kept = self._kept[sequence][layer]
        if kept.tokens != length:
            raise UserError(
                f"block {layer}: the state of sequence {sequence} is that after {kept.tokens} tokens, {length} are in "
                "the context; begin the sequence anew"
            )
        mixed, kept.inputs = causal_convolution(rows[:, : m.channels], kept.inputs, w["delta_conv"])
        keys = m.key_heads * m.key_dim
        q, k, v = torch.split(mixed, [keys, keys, m.values], -1)
        q, k = (self._normed(each) for each in (q, k))
        beta = (x @ w["delta_beta"].T).sigmoid()
        decay = (-w["delta_a_log"].exp() * softplus(x @ w["delta_alpha"].T + w["delta_dt_bias"])).exp()
        by_head = torch.unflatten(v, -1, (m.value_heads, m.value_dim))
        outputs = delta_rule(q * m.key_dim**-0.5, k, by_head, decay, beta, kept.state)
        kept.tokens = length + len(rows)
        gates = torch.unflatten(rows[:, m.channels :], -1, (m.value_heads, m.value_dim))
        return (rms_norm(outputs, w["delta_norm"], self._eps) * silu(gates)).flatten(1)

    def copy(self, source: int, to: int) -> None:
        """Let a sequence have the state of another."""
        self._kept[to] = {
            layer: _Kept(kept.state.clone(), kept.inputs, kept.tokens) for layer, kept in self._kept[source].items()
        }

    def _normed(self, rows: Tensor) -> Tensor:
        """Queries or keys, of length 1 in each head, for each value head: [S, value_heads, key_dim]."""
        m = self._mixer
        x = torch.unflatten(rows, -1, (m.key_heads, m.key_dim))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(m.value_heads // m.key_heads, 1)

    def _zeros(self, layer: int) -> _Kept:
        m, like = self._mixer, self._layers[layer]["delta_conv"]
        return _Kept(like.new_zeros(m.value_heads, m.key_dim, m.value_dim), like.new_zeros(m.taps - 1, m.channels))


def states_of(
    mixer: DeltaNet | None, layers: Sequence[Mapping[str, Tensor]], eps: float, sequences: int
) -> DeltaNetStates | None:
    """The states of a model, by what each of its blocks has of a delta net; None where none has one."""
    if mixer is None:
        return None
    return DeltaNetStates(mixer, {n: layer for n, layer in enumerate(layers) if layer}, eps, sequences)

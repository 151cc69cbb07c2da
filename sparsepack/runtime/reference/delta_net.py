"""The oracle's mixers that keep a state in place of keys and values, in plain torch: the gated delta net (Gated Delta
Networks, arXiv 2412.06464) and the state-space model (Mamba-2, arXiv 2405.21060), token by token, the latter by chunks,
too, and LFM2's short convolution."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sparsepack.errors import UserError
from sparsepack.models.blocks import DeltaNet, Mamba
from sparsepack.runtime.reference.products import rms_norm

CHUNK = 64
"""A state-space model takes so many positions of a prompt together."""
L2_EPS = 1e-6
"""Is added to the sum of a head's squares, by whose root queries and keys are divided."""


def causal_convolution(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution of each channel over the last taps positions.

    x      -- float32 [S, channels]
    before -- the inputs before them [taps - 1, channels], the oldest first; zeros before a text
    weight -- [channels, taps], the last one is of a position itself

    Returns float32 [S, channels], and the last taps - 1 inputs.
    """
    taps = weight.shape[1]
    seen = torch.cat([before, x])
    summed = sum(seen[tap : tap + len(x)] * weight[:, tap] for tap in range(taps))
    assert isinstance(summed, Tensor)
    return summed, seen[len(x) :]


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


def state_space(x: Tensor, b: Tensor, c: Tensor, steps: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """The outputs h c of each head after h = exp(-rate d) h + d x b, token by token.

    x     -- float32 [S, heads, head_dim]
    b, c  -- float32 [S, heads, state]
    steps -- d, float32 [S, heads]; rate: float32 [heads]
    state -- h, float32 [heads, head_dim, state], which is changed

    Returns float32 [S, heads, head_dim].
    """
    outputs = torch.empty_like(x)
    for t in range(len(x)):
        state *= (-rate * steps[t]).exp()[:, None, None]
        state += (steps[t, :, None] * x[t])[:, :, None] * b[t, :, None]
        outputs[t] = torch.einsum("hds,hs->hd", state, c[t])
    return outputs


def state_space_chunks(x: Tensor, b: Tensor, c: Tensor, steps: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """What `state_space` returns, by chunks of positions (Mamba-2, section 6): within a chunk, products of matrices,
    with decays from the logarithms of each in float64."""
    if not len(x):
        return torch.empty_like(x)
    pieces = zip(*(torch.split(each, CHUNK) for each in (x, b, c, steps)), strict=True)
    return torch.cat([_chunk(piece, rate, state) for piece in pieces])


def _chunk(piece: tuple[Tensor, ...], rate: Tensor, state: Tensor) -> Tensor:
    x, b, c, steps = piece
    since = (-rate.double() * steps.double()).cumsum(0).t()  # logarithm of the decay up to each position, [heads, S]
    between = (since[:, :, None] - since[:, None]).exp().float().tril()
    given = steps[..., None] * x
    scores = torch.einsum("ths,uhs->htu", c, b) * between
    before = torch.einsum("ths,hds->thd", c, state) * since.exp().float().t()[..., None]
    outputs = torch.einsum("htu,uhd->thd", scores, given) + before
    state *= since[:, -1].exp().float()[:, None, None]
    state += torch.einsum("hu,uhd,uhs->hds", between[:, -1], given, b)
    return outputs


@dataclass
class _Kept:
    """What a sequence keeps of a block: state [value_heads, key_dim, value_dim], or [heads, head_dim, state], after so
    many tokens, empty of a short convolution, and the last inputs of the convolution [taps - 1, channels]."""

    state: Tensor
    inputs: Tensor
    tokens: int = 0


class States(ABC):
    """The states of the blocks of a model that keep one, for one sequence or several. A sequence without tokens begins
    with zeros, whatever was there.

    layers -- number of a block -> `PackedLayer.delta_net` of it, on the device that computes
    """

    def __init__(self, layers: Mapping[int, Mapping[str, Tensor]], sequences: int) -> None:
        self._layers = layers
        self._kept = [{layer: self._zeros(layer) for layer in layers} for _ in range(sequences)]

    def mix(self, layer: int, rows: Tensor, x: Tensor, sequence: int, length: int) -> Tensor:
        """What attn_out is given for the tokens after the first `length` of a sequence; their state is kept.

        rows -- what attn_in gives [S, rows]
        x    -- what attn_in is given [S, hidden]

        Returns float32 [S, columns of attn_out]. Raises `UserError` where the state is not that after `length` tokens:
        it cannot forget some.
        """
        if not length:
            self._kept[sequence][layer] = self._zeros(layer)
        kept = self._kept[sequence][layer]
        if kept.tokens != length:
            raise UserError(
                f"block {layer}: the state of sequence {sequence} is that after {kept.tokens} tokens, {length} are in "
                "the context; begin the sequence anew"
            )
        kept.tokens = length + len(rows)
        return self._mixed(layer, rows, x, kept)

    def copy(self, source: int, to: int) -> None:
        """Let a sequence have the state of another."""
        self._kept[to] = {
            layer: _Kept(kept.state.clone(), kept.inputs, kept.tokens) for layer, kept in self._kept[source].items()
        }

    @abstractmethod
    def _mixed(self, layer: int, rows: Tensor, x: Tensor, kept: _Kept) -> Tensor:
        """What `mix` returns; the state and the inputs in `kept` become those after these tokens."""

    @abstractmethod
    def _zeros(self, layer: int) -> _Kept:
        """What a block keeps before the first token."""


class ShortConvStates(States):
    """Those of short convolutions. Rows of attn_in are b, c and u of all channels."""

    def _mixed(self, layer: int, rows: Tensor, x: Tensor, kept: _Kept) -> Tensor:
        b, c, u = rows.chunk(3, -1)
        mixed, kept.inputs = causal_convolution(b * u, kept.inputs, self._layers[layer]["short_conv"])
        return c * mixed

    def _zeros(self, layer: int) -> _Kept:
        weight = self._layers[layer]["short_conv"]
        return _Kept(weight.new_zeros(0), weight.new_zeros(weight.shape[1] - 1, len(weight)))


class DeltaNetStates(States):
    """Those of gated delta nets. Rows of attn_in are queries, keys and values of all heads, then gates of the output.

    eps -- of the norm of outputs
    """

    def __init__(self, mixer: DeltaNet, layers: Mapping[int, Mapping[str, Tensor]], eps: float, sequences: int) -> None:
        self._mixer, self._eps = mixer, eps
        super().__init__(layers, sequences)

    def _mixed(self, layer: int, rows: Tensor, x: Tensor, kept: _Kept) -> Tensor:
        m, w = self._mixer, self._layers[layer]
        mixed, kept.inputs = causal_convolution(rows[:, : m.channels], kept.inputs, w["delta_conv"])
        keys = m.key_heads * m.key_dim
        q, k, v = torch.split(silu(mixed), [keys, keys, m.values], -1)
        q, k = (self._normed(each) for each in (q, k))
        beta = (x @ w["delta_beta"].T).sigmoid()
        decay = (-w["delta_a_log"].exp() * softplus(x @ w["delta_alpha"].T + w["delta_dt_bias"])).exp()
        by_head = torch.unflatten(v, -1, (m.value_heads, m.value_dim))
        outputs = delta_rule(q * m.key_dim**-0.5, k, by_head, decay, beta, kept.state)
        gates = torch.unflatten(rows[:, m.channels :], -1, (m.value_heads, m.value_dim))
        return (rms_norm(outputs, w["delta_norm"], self._eps) * silu(gates)).flatten(1)

    def _normed(self, rows: Tensor) -> Tensor:
        """Queries or keys, of length 1 in each head, for each value head: [S, value_heads, key_dim]."""
        m = self._mixer
        x = torch.unflatten(rows, -1, (m.key_heads, m.key_dim))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(m.value_heads // m.key_heads, 1)

    def _zeros(self, layer: int) -> _Kept:
        m, like = self._mixer, self._layers[layer]["delta_conv"]
        return _Kept(like.new_zeros(m.value_heads, m.key_dim, m.value_dim), like.new_zeros(m.taps - 1, m.channels))


class MambaStates(States):
    """Those of state-space models (Mamba-2). Rows of attn_in are as `blocks.Mamba` says.

    eps -- of the norm of outputs
    """

    def __init__(self, mixer: Mamba, layers: Mapping[int, Mapping[str, Tensor]], eps: float, sequences: int) -> None:
        self._mixer, self._eps = mixer, eps
        super().__init__(layers, sequences)

    def _mixed(self, layer: int, rows: Tensor, x: Tensor, kept: _Kept) -> Tensor:
        m, w = self._mixer, self._layers[layer]
        gates, inputs, steps = torch.split(rows, [m.inner, m.channels, m.heads], -1)
        mixed, kept.inputs = causal_convolution(inputs, kept.inputs, w["mamba_conv"])
        of_groups = m.groups * m.state
        x, b, c = torch.split(silu(mixed + w["mamba_conv_bias"]), [m.inner, of_groups, of_groups], -1)
        x = torch.unflatten(x, -1, (m.heads, m.head_dim))
        b, c = (
            torch.unflatten(each, -1, (m.groups, m.state)).repeat_interleave(m.heads // m.groups, 1) for each in (b, c)
        )
        steps = softplus(steps + w["mamba_dt_bias"])
        over = state_space if len(x) == 1 else state_space_chunks
        outputs = over(x, b, c, steps, w["mamba_a_log"].exp(), kept.state) + w["mamba_skip"][:, None] * x
        gated = torch.unflatten(outputs.flatten(1) * silu(gates), -1, (m.norms, -1))
        return rms_norm(gated, w["mamba_norm"].view(m.norms, -1), self._eps).flatten(1)

    def _zeros(self, layer: int) -> _Kept:
        m, like = self._mixer, self._layers[layer]["mamba_conv"]
        return _Kept(like.new_zeros(m.heads, m.head_dim, m.state), like.new_zeros(m.taps - 1, m.channels))


def states_of(
    mixer: DeltaNet | Mamba | None, layers: Sequence[Mapping[str, Tensor]], eps: float, sequences: int
) -> States | None:
    """The states of a model, by what each of its blocks that keep one has of its mixer; None where none keeps one.

    mixer -- the delta net or the state-space model of these; None: they have short convolutions
    """
    of_layers = {n: layer for n, layer in enumerate(layers) if layer}
    if mixer is None:
        return ShortConvStates(of_layers, sequences) if of_layers else None
    if isinstance(mixer, Mamba):
        return MambaStates(mixer, of_layers, eps, sequences)
    return DeltaNetStates(mixer, of_layers, eps, sequences)

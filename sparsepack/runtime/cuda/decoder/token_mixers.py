"""The token mixers that the cuda decoder runs between attn_in and attn_out, a class for each kind: their part of a
step, and of prefill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import LATENT_EPS, Attention, Latent
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache, CudaLatentKvCache
from sparsepack.runtime.cuda.attention.latents import LatentWeights, latent_parts, of_ones
from sparsepack.runtime.cuda.attention.states import Mixer, States
from sparsepack.runtime.cuda.decoder.buffers import Buffers, Launch
from sparsepack.runtime.cuda.decoder.model import CudaModel
from sparsepack.runtime.cuda.decoder.sites import CudaSite
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input


@dataclass(frozen=True)
class MixerStep:
    """A block's step as its token mixer sees it.

    of      -- the block's buffers: from `qkv` to `attn_output`
    input   -- what attn_in took
    product -- given the name under which a matrix is counted, its site, an input and y: the launch of its product
    active  -- given such a name: int64 [], where it is counted
    sparse  -- whether inactive units are left out
    """

    of: Buffers
    input: Input
    product: Callable[..., Launch]
    active: Callable[[str], Tensor]
    sparse: bool


@dataclass(frozen=True)
class MixerPrompt:
    """What a token mixer has of a prompt.

    rows     -- what attn_in gives [S, rows]; x: what it takes
    multiply -- given a site and its input: the product
    counted  -- int32 [1]: so many positions count; None: all
    """

    rows: Product
    x: ScaledFp16
    multiply: Callable[[CudaSite, ScaledFp16], Product]
    sequence: int
    counted: Tensor | None


class TokenMixer(Protocol):
    """A block's token mixer with its part of a cache."""

    @property
    def flag_in_data(self) -> bool:
        """Whether attn_out can read what a step leaves as soon as it is stored."""

    def step(self, step: MixerStep) -> Iterator[Launch]:
        """The kernels between attn_in and attn_out."""

    def prefill(self, of: MixerPrompt) -> Tensor:
        """Append the positions of a prompt to the cache, or go on with a state. Returns what attn_out takes: float32
        [S, columns]."""


@dataclass(frozen=True)
class AttentionMixer:
    """Attention whose queries, keys and values are rows of attn_in.

    number -- of the block among those with keys and values
    norms  -- of the queries and of the keys of all heads together, with `eps`; None: there are none
    gated  -- whether the outputs of heads are multiplied by gates
    shared -- whether keys and values are those of an earlier block, which must have left them: queries are not read
              before the kernel ahead has ended
    """

    cache: CudaKvCache
    kernels: Kernels
    architecture: Architecture
    number: int
    norms: tuple[Tensor, Tensor] | None
    gated: bool
    shared: bool = False

    @property
    def flag_in_data(self) -> bool:
        return self.cache.flag_in_data

    def step(self, step: MixerStep) -> Iterator[Launch]:
        of, sequences = step.of, len(self.cache.lengths)
        flag_in_data = of.flag_in_data and self.flag_in_data and not self.shared
        qkv, out = of.qkv.view(sequences, -1), of.attn_output.view(sequences, -1)
        if self.norms is not None and of.normed is not None:
            normed, eps = of.normed.view(sequences, -1), float(self.architecture.norm_eps)
            yield partial(self.kernels.norm_rows, qkv, self.norms, eps, normed, flag_in_data=of.flag_in_data)
            qkv = normed
        yield partial(self.cache.step, self.number, qkv, step.sparse, out, flag_in_data)

    def prefill(self, of: MixerPrompt) -> Tensor:
        rows = of.rows
        if self.norms is not None:
            rows = self.kernels.norm_prefill_rows(rows, self.norms, self.architecture.norm_eps)
        queries = self.cache.append(self.number, rows, of.sequence)
        attended = self.cache.attend(self.number, queries, of.sequence)
        return attended * _gates(rows, self.architecture) if self.gated else attended


@dataclass(frozen=True)
class LatentMixer:
    """Attention by latents (MLA).

    norms     -- of the latents of queries, None where these have none, and of keys and values
    q_b, kv_b -- the sites that read latents; q_b None: attn_in gives queries
    weights   -- attn_kv_b as steps multiply with it where latents are cached; None: keys and values are
    """

    cache: CudaKvCache
    kernels: Kernels
    heads: int
    number: int
    latent: Latent
    norms: tuple[Tensor | None, Tensor]
    q_b: CudaSite | None
    kv_b: CudaSite
    weights: LatentWeights | None

    @property
    def flag_in_data(self) -> bool:
        return self.cache.flag_in_data

    def step(self, step: MixerStep) -> Iterator[Launch]:
        of, to, kernels, count = step.of, step.of.latent, self.kernels, len(self.cache.lengths)
        assert to is not None
        flag, flag_of_cache = of.flag_in_data, of.flag_in_data and self.flag_in_data
        qkv, out = to.qkv.view(count, -1), of.attn_output.view(count, -1)
        q, kv, turning = latent_parts(self.latent, self.heads, to.normed, count)
        widths = (q.shape[1], kv.shape[1], turning.shape[1])
        normed = partial(kernels.norm_latents, of.qkv.view(count, -1), self.norms, widths, LATENT_EPS, to.normed)
        yield partial(normed, flag_in_data=flag)
        if self.q_b is not None and to.queries is not None:
            yield step.product("attn_q_b", self.q_b, Input(_like(q, to.queries), flag_in_data=flag), to.queries)
            q = to.queries.view(count, -1)
        if self.weights is not None:
            queries = partial(kernels.latent_queries, self.weights, q, kv, turning, qkv)
            yield partial(queries, active=step.active("attn_kv_b"), flag_in_data=flag)
            mixed = to.kv.view(count, -1)
            yield partial(self.cache.step, self.number, qkv, step.sparse, mixed, flag_of_cache)
            yield partial(kernels.latent_outputs, self.weights, mixed, out, flag_in_data=flag)
            return
        yield step.product("attn_kv_b", self.kv_b, Input(_like(kv, to.kv), flag_in_data=flag), to.kv)
        of_kv = of_ones(to.kv.view(count, -1))
        join = partial(kernels.join_latents, self.latent, self.heads, of_ones(q), of_kv, turning, qkv)
        yield partial(join, flag_in_data=flag)
        yield partial(self.cache.step, self.number, qkv, step.sparse, out, flag_of_cache)

    def prefill(self, of: MixerPrompt) -> Tensor:
        queries, latents, turning = self._latents(of)
        cache, sequence = self.cache, of.sequence
        if not isinstance(cache, CudaLatentKvCache):
            q = cache.append(self.number, of_ones(self._heads(of, queries, latents, turning)), sequence)
            return cache.attend(self.number, q, sequence)
        before = None
        if cache.lengths[sequence]:
            cached, turned = cache.latents(self.number, sequence)
            none = of_ones(queries.sums.new_zeros(len(cached), queries.sums.shape[1]))
            before = self._heads(of, none, cached, turned)
        cache.append_latents(self.number, latents, turning, sequence)
        return cache.attend_prompt(self.number, of_ones(self._heads(of, queries, latents, turning)), before, sequence)

    def _latents(self, of: MixerPrompt) -> tuple[Product, Tensor, Tensor]:
        """Queries, latents of keys and values, normed, and the part of keys that turns."""
        rows = of.rows
        normed = torch.empty_like(rows.sums)
        q, kv, turning = latent_parts(self.latent, self.heads, normed, len(normed))
        widths = (q.shape[1], kv.shape[1], turning.shape[1])
        self.kernels.norm_latents(rows, self.norms, widths, LATENT_EPS, normed)
        queries = of_ones(q) if self.q_b is None else of.multiply(self.q_b, self.kernels.to_scaled_fp16(q))
        return queries, kv, turning

    def _heads(self, of: MixerPrompt, queries: Product, latents: Tensor, turning: Tensor) -> Tensor:
        """Queries, keys and values of all heads: float32 [S, 3 * heads * head_dim]."""
        of_kv = of.multiply(self.kv_b, self.kernels.to_scaled_fp16(latents))
        qkv = torch.empty(len(latents), 3 * self.heads * self.latent.head_dim, device=latents.device)
        self.kernels.join_latents(self.latent, self.heads, queries, of_kv, turning, qkv)
        return qkv


@dataclass(frozen=True)
class StateMixer:
    """A mixer that keeps a state in place of keys and values. cache -- knows the positions of texts"""

    cache: CudaKvCache
    kernels: Kernels
    mixer: Mixer

    @property
    def flag_in_data(self) -> bool:
        return True

    def step(self, step: MixerStep) -> Iterator[Launch]:
        of, sequences = step.of, len(self.cache.lengths)
        rows, out = of.qkv.view(sequences, -1), of.attn_output.view(sequences, -1)
        launch = partial(self.mixer.step, self.kernels, rows, step.input, self.cache.positions.there, out)
        yield partial(launch, flag_in_data=of.flag_in_data)

    def prefill(self, of: MixerPrompt) -> Tensor:
        first = self.cache.lengths[of.sequence]
        return self.mixer.prefill(self.kernels, of.rows, of.x, first, of.sequence, of.counted)


def token_mixers(model: CudaModel, cache: CudaKvCache, states: States, kernels: Kernels) -> list[TokenMixer | None]:
    """The token mixer of each block of a model; None: the block is an MLP alone."""
    a, found = model.architecture, list[TokenMixer | None]()
    cached = {layer: number for number, layer in enumerate(a.attention_layers)}
    for number, layer in enumerate(model.layers):
        if not layer.attention:
            found.append(None)
        elif number in states.blocks:
            found.append(StateMixer(cache, kernels, states.blocks[number]))
        elif layer.latent_norms is not None:
            assert a.latent is not None
            q_b, kv_b = layer.attention.get("attn_q_b"), layer.attention["attn_kv_b"]
            sites = (layer.latent_norms, q_b, kv_b, layer.latents)
            found.append(LatentMixer(cache, kernels, a.heads, cached[number], a.latent, *sites))
        else:
            block = a.blocks[number].mixer
            gated = isinstance(block, Attention) and block.gated
            shared = isinstance(block, Attention) and block.source is not None
            found.append(AttentionMixer(cache, kernels, a, cached[number], layer.row_norms, gated, shared))
    return found


def _like(rows: Tensor, buffer: Tensor) -> Tensor:
    """Rows [B, width], as products take them beside a buffer: [width] where that has one row without an axis for it."""
    return rows if buffer.ndim == 2 else rows[0]


def _gates(qkv: Product, architecture: Architecture) -> Tensor:
    """What the outputs of attention are multiplied by: float32 [S, heads * head_dim]."""
    heads, head_dim = architecture.heads, architecture.head_dim
    of_heads = qkv.part(0, 2 * heads * head_dim)
    rows = of_heads.sums * (of_heads.factor * of_heads.inverse)[:, None]
    rows = rows if of_heads.bias is None else rows + of_heads.bias
    gates: Tensor = torch.unflatten(rows, 1, (heads, 2, head_dim))[:, :, 1]
    return gates.flatten(1).sigmoid()

"""The seam between a decoder and its attention: who keeps keys and values, and what queries make of them.

A decoder hands over the output rows of the site `attn_in` and gets the input of `attn_out` back. What happens between -
norms of heads, rotary embedding, the layout of the cache, which positions are read - is the cache's own business, so
that sparse or offloaded attention is another cache, not another decoder.

    qkv [S, (heads + 2 kv_heads) head_dim] --append--> queries, keys and values in the cache
    queries                                --attend--> [S, heads head_dim]

Layout of dense caches, per layer, for keys and for values: [sequences, kv_heads, context, head_dim], channels adjacent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Attention, Latent
from sparsepack.models.sparse_attention import SparseAttention, SparseFrom, TokenPolicy


@dataclass(frozen=True)
class LayerAttention:
    """What attention is like in one layer.

    window         -- positions that a query sees, its own included; 0: all
    q_norm, k_norm -- float32 [head_dim]: RMSNorm of every head before it is rotated; None: there is none
    channels       -- int64 [kv_heads, r]: the heavy channels by which decoded positions find what they read; None: they
                      read all that they see
    table          -- the number of the rotary table by which it turns
    sinks          -- float32 [heads]: scores beside those of keys, for which nothing is added; None: there are none
    gated          -- whether it has output gates. Caches of the cuda backend take them with what attn_in gives, others
                      queries, keys and values alone
    kv_heads, head_dim -- where they are not the shape's; 0: they are
    value_norm     -- whether each head's values are divided by their root mean square
    source         -- the number of an earlier layer of the shape whose keys and values it reads: caches are given
                      queries alone, and keep nothing for it; None: it has its own
    k_eq_v         -- whether values are keys as they come. Caches of the cuda backend are given these once, others both
    """

    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    channels: Tensor | None = None
    table: int = 0
    sinks: Tensor | None = None
    gated: bool = False
    kv_heads: int = 0
    head_dim: int = 0
    value_norm: bool = False
    k_eq_v: bool = False
    source: int | None = None


@dataclass(frozen=True)
class AttentionShape:
    """What a cache is made for.

    heads, kv_heads, head_dim -- query head h reads key head h * kv_heads // heads
    eps                       -- of the heads' norms
    cos, sin                  -- float32 [context, n / 2], as `reference.rotary_table` gives them: of the first n
                                 channels of a head, the others do not turn
    layers                    -- in order of execution
    sequences                 -- how many side by side
    policy                    -- how many tokens decoded positions read in layers with heavy channels; None: all
    scale                     -- what products of queries and keys are multiplied by; 0: 1 / sqrt(head_dim)
    cap                       -- a score s becomes cap tanh(s / cap); 0: it stays
    more_tables               -- cos and sin of the tables after the first, which alone long sequences may change
    turns                     -- whether they do: positions of a sequence may turn by rows of its own, of `set_rope`
    neighbours                -- whether channels 2 c and 2 c + 1 of a head turn together, in place of halves
    query_scale               -- float32 [context]: what queries are multiplied by at each position; None: nothing
    value_dim                 -- channels of a head's values, behind which there are zeros. Caches of the cuda backend
                                 leave these out of what they return; 0: all of a head are values
    latents                   -- those that caches of the cuda backend keep in place of keys and values; None: they keep
                                 these
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: Tensor
    sin: Tensor
    layers: tuple[LayerAttention, ...]
    sequences: int = 1
    policy: TokenPolicy | None = None
    scale: float = 0.0
    cap: float = 0.0
    more_tables: tuple[tuple[Tensor, Tensor], ...] = ()
    turns: bool = False
    query_scale: Tensor | None = None
    neighbours: bool = False
    value_dim: int = 0
    latents: Latent | None = None

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """cos and sin of every table, in the order of their numbers."""
        return (self.cos, self.sin), *self.more_tables

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float(self.scale or self.head_dim**-0.5)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Heads of keys, and channels of a head, in a layer."""
        of = self.layers[layer]
        return of.kv_heads or self.kv_heads, of.head_dim or self.head_dim

    @property
    def context(self) -> int:
        """Positions that there is room for in each sequence."""
        return self.cos.shape[0]

    @property
    def sparse_from(self) -> SparseFrom | None:
        """From how many tokens on the policy lets decoded positions read a part; None: they read all."""
        return None if self.policy is None else self.policy.sparse_from

    @cached_property
    def budgets(self) -> Tensor:
        """How many tokens a decoded position reads that sees 0, 1, .. `context` of them: int32 [context + 1].

        Raises `ValueError` where the shape has no policy.
        """
        if self.policy is None:
            raise ValueError("the shape has no policy")
        return torch.tensor([self.policy.budget(seen) for seen in range(self.context + 1)], dtype=torch.int32)


class CacheState(Protocol):
    """What a cache says of itself.

    type        -- of what is kept: "f32", "f16" or "bf16"
    sparse_from -- from how many tokens of a sequence on decoded positions read a part of them; None: they read all
    """

    @property
    def type(self) -> str: ...

    @property
    def sparse_from(self) -> SparseFrom | None: ...

    @property
    def lengths(self) -> Sequence[int]:
        """How many positions are cached of each sequence: the next one's number."""


class KvCache(CacheState, Protocol):
    """Keys and values of every layer, for one sequence or several."""

    def append(self, layer: int, qkv: Any, sequence: int = 0) -> Any:
        """Norm and rotate queries and keys of the S positions after a sequence's last, and put keys and values behind
        those that are cached. `qkv` holds q, then k, then v: [S, (heads + 2 kv_heads) * head_dim], float32 or what the
        backend's products give; of a layer that reads another's keys and values q alone. Returns the queries, as
        `attend` takes them. Counts nothing: see `advance`."""

    def attend(self, layer: int, queries: Any, sequence: int = 0, sparse: bool = False) -> Tensor:
        """softmax(q k^T / sqrt(head_dim)) v over the positions that each query sees, those just appended included:
        float32 [S, heads * head_dim]. `sparse`: these are decoded, and read no more than the shape's policy allows."""

    def advance(self, positions: int, sequence: int = 0) -> None:
        """Count positions that all layers have appended."""

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget what a sequence has beyond its first `length` positions."""

    def copy(self, source: int, to: int, length: int) -> None:
        """Let a sequence have the first `length` positions of another, and nothing else."""

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        """Let the positions of a sequence from `first` on turn by these rows [S, n / 2] when they are appended, in
        layers of the first table."""

    def reset(self) -> None:
        """Forget everything but how positions turn."""


def attention_shape(
    architecture: Architecture,
    norms: Sequence[tuple[Tensor | None, Tensor | None]],
    cos: Tensor,
    sin: Tensor,
    sequences: int = 1,
    sparse: SparseAttention | None = None,
    more_tables: Sequence[tuple[Tensor, Tensor]] = (),
    sinks: Sequence[Tensor | None] = (),
) -> AttentionShape:
    """What a model's cache is made for.

    norms       -- q_norm and k_norm of every layer with attention; the cache has these alone
    cos, sin    -- on the device that attends
    sparse      -- which tokens decoded positions read; None: all
    more_tables -- as the shape has them, `Architecture.rotary_tables` after the first
    sinks       -- of every layer with attention; empty: no layer has any
    """
    channels = sparse.channels if sparse else (None,) * architecture.layers
    mixers = [(architecture.blocks[n].mixer, channels[n]) for n in architecture.attention_layers]
    long = architecture.long_texts
    layers = tuple(
        LayerAttention(
            mixer.window,
            _to_device_of(q, cos),
            _to_device_of(k, cos),
            _to_device_of(heavy, cos),
            mixer.rope,
            _to_device_of(of_heads, cos),
            mixer.gated,
            mixer.kv_heads if architecture.global_heads else 0,
            mixer.head_dim if architecture.global_heads else 0,
            mixer.value_norm,
            mixer.k_eq_v,
            None if mixer.source is None else architecture.attention_layers.index(mixer.source),
        )
        for (mixer, heavy), (q, k), of_heads in zip(mixers, norms, sinks or (None,) * len(mixers), strict=True)
        if isinstance(mixer, Attention)
    )
    return AttentionShape(
        architecture.heads,
        architecture.kv_heads,
        architecture.head_dim,
        architecture.norm_eps,
        cos,
        sin,
        layers,
        sequences,
        sparse.policy if sparse else None,
        architecture.attention_scale,
        architecture.attention_cap,
        tuple(more_tables),
        long is not None and len(cos) > long.tokens,
        query_scales(architecture, len(cos), cos.device),
        architecture.heads_and_rope.rotary.convention == "interleaved",
        0 if architecture.latent is None else architecture.latent.value,
    )


def query_scales(architecture: Architecture, context: int, device: torch.device) -> Tensor | None:
    """What queries are multiplied by at each position: float32 [context]; None: by nothing anywhere."""
    if not architecture.query_growth or context <= architecture.query_growth[1]:
        return None
    growth, every = architecture.query_growth
    return 1 + growth * torch.log(1 + torch.floor(torch.arange(context, device=device) / every))


def _to_device_of(x: Tensor | None, other: Tensor) -> Tensor | None:
    return None if x is None else x.to(other.device)

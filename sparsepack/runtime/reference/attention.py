"""The oracle's attention in plain torch: rotary embedding, masks, softmax, and the cache that attends to everything."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepack.models.activations import soft_capped
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.reference.products import rms_norm

CACHE_TYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""The types of cached keys and values stand under the names that benchmarks print."""


def rotary_table(inv_freq: Tensor, scale: float, context: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions from `first` on: float32 [n / 2] -> twice float32 [context - first,
    n / 2]."""
    angles = torch.arange(first, context, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Rotary embedding, halves apart: channel i of the first n is rotated together with i + n / 2, the others stay.
    With `neighbours`, channel 2 i with 2 i + 1.

    x: float32 [heads, S, head_dim]; cos, sin: [S, n / 2], the rows of the positions in question.
    """
    half = cos.shape[-1]
    if neighbours:
        even, odd = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return torch.cat([pairs.flatten(-2), x[..., 2 * half :]], -1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def visible(first: int, queries: int, keys_from: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Which positions a query sees: those up to its own, with a window at most that many.

    first     -- position of the first query
    keys_from -- position of the first key; the last key is the last query's
    window    -- 0: no limit

    Returns bool [queries, first + queries - keys_from].
    """
    query = torch.arange(first, first + queries, device=device)[:, None]
    key = torch.arange(keys_from, first + queries, device=device)
    seen = key <= query
    return seen & (key > query - window) if window else seen


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [heads, ..., T] over the last dimension, where each head has one more score for which
    nothing is added.

    sinks -- float32 [heads]; None: heads have none
    """
    if sinks is None:
        return scores.softmax(-1)
    of_heads = sinks.view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, of_heads], -1).softmax(-1)[..., :-1]


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v with grouped queries: query head h reads key head h * kv_heads // heads.

    q            -- float32 [heads, S, head_dim]
    keys, values -- float32 [kv_heads, T, head_dim]
    seen         -- bool [S, T]; every query sees at least one key
    scale        -- in place of 1 / sqrt(head_dim); 0: that
    cap          -- of scores, as `soft_capped` takes it
    sinks        -- as `with_sinks` takes them

    Returns float32 [S, heads * head_dim].
    """
    heads, length, head_dim = q.shape
    grouped = q.reshape(keys.shape[0], -1, head_dim)  # [kv_heads, group * S, head_dim]
    scores = soft_capped(torch.matmul(grouped, keys.transpose(1, 2)) * (scale or head_dim**-0.5), cap)
    scores = scores.view(heads, length, -1).masked_fill(~seen, float("-inf"))
    weights = with_sinks(scores, sinks).view(*grouped.shape[:2], -1)
    attn_output = torch.matmul(weights, values).view(heads, length, head_dim)
    return attn_output.transpose(0, 1).reshape(length, -1)


class DenseKvCache:
    """See `runtime.kv_cache.KvCache`. Every query attends to every position that its layer's window shows it.

    Layout: of each layer keys and values [sequences, kv_heads, context, head_dim], of `type`, 8 bytes * layers *
    kv_heads * head_dim a position for "f32". Queries are float32 [heads, S, head_dim]; sums are float32.
    """

    def __init__(self, shape: AttentionShape, type: str, device: torch.device | str) -> None:
        self.type, self.sparse_from = type, shape.sparse_from
        self._shape = shape
        self._keys, self._values = list[Tensor](), list[Tensor]()
        for layer, of in enumerate(shape.layers):
            kv_heads, width = shape.heads_of(layer)
            size = shape.sequences, kv_heads, shape.context, width
            for cached in (self._keys, self._values):
                own = None if of.source is None else cached[of.source]
                cached.append(torch.zeros(size, dtype=CACHE_TYPES[type], device=device) if own is None else own)
        self._lengths = [0] * shape.sequences
        self._tables = [[*shape.tables] for _ in range(shape.sequences)]

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    def append(self, layer: int, qkv: Tensor, sequence: int = 0) -> Tensor:
        shape, norms = self._shape, self._shape.layers[layer]
        kv_heads, width = shape.heads_of(layer)
        by_head = torch.unflatten(qkv, -1, (-1, width)).transpose(0, 1)  # [all heads, S, head_dim]
        new = slice(self._lengths[sequence], self._lengths[sequence] + len(qkv))
        cos, sin = (of[new] for of in self._tables[sequence][norms.table])
        if norms.source is None:
            k, v = torch.split(by_head[shape.heads :], kv_heads)
            self._keys[layer][sequence, :, new] = self._apply_rope(k, norms.k_norm, cos, sin)
            if norms.value_norm:
                v = rms_norm(v, torch.ones_like(v[0, 0]), shape.eps)
            self._values[layer][sequence, :, new] = v
        q = by_head[: shape.heads]
        queries = self._apply_rope(q, norms.q_norm, cos, sin)
        return queries if shape.query_scale is None else queries * shape.query_scale[new, None]

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        of_layer, first = self._shape.layers[layer], self._lengths[sequence]
        window = of_layer.window
        last = first + queries.shape[1]
        oldest = max(0, first + 1 - window) if window else 0
        seen = visible(first, queries.shape[1], oldest, window, queries.device)
        keys, values = (cached[layer][sequence, :, oldest:last].float() for cached in (self._keys, self._values))
        return attention(queries, keys, values, seen, self._shape.scale, self._shape.cap, of_layer.sinks)

    def advance(self, positions: int, sequence: int = 0) -> None:
        self._lengths[sequence] += positions

    def truncate(self, length: int, sequence: int = 0) -> None:
        self._lengths[sequence] = length

    def copy(self, source: int, to: int, length: int) -> None:
        for cached in (*self._keys, *self._values):
            cached[to, :, :length] = cached[source, :, :length]
        self._lengths[to] = length

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        own, shape = self._tables[sequence], self._shape
        if own[0][0] is shape.cos:
            own[0] = shape.cos.clone(), shape.sin.clone()
        for of, rows in zip(own[0], (cos, sin), strict=True):
            of[first : first + len(rows)] = rows.to(of.device)

    def reset(self) -> None:
        self._lengths = [0] * self._shape.sequences

    def _apply_rope(self, x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries or keys [heads, S, head_dim], normed where the model does that, and rotated."""
        if norm is not None:
            x = rms_norm(x, norm, self._shape.eps)
        return rotate(x, cos, sin, self._shape.neighbours)

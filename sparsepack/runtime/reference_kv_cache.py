"""The oracle's cache: keys and values, and attention to all of them, in plain torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepack.runtime import reference
from sparsepack.runtime.kv_cache import AttentionShape

CACHE_TYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Types of cached keys and values, by the names that benchmarks print."""


class DenseKvCache:
    """See `runtime.kv_cache.KvCache`. Every query attends to every position that its layer's window shows it.

    Layout: keys and values [layers, sequences, kv_heads, context, head_dim], of `type`, 8 bytes * layers * kv_heads *
    head_dim a position for "f32". Queries are float32 [heads, S, head_dim]; sums are float32.
    """

    def __init__(self, shape: AttentionShape, device: torch.device | str, type: str) -> None:
        self.type = type
        self._shape = shape
        room = (len(shape.layers), shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        self._keys, self._values = (torch.zeros(room, dtype=CACHE_TYPES[type], device=device) for _ in range(2))
        self._lengths = [0] * shape.sequences

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    def append(self, layer: int, qkv: Tensor, sequence: int = 0) -> Tensor:
        shape, norms = self._shape, self._shape.layers[layer]
        rows = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = torch.split(qkv, rows, dim=-1)
        new = slice(self._lengths[sequence], self._lengths[sequence] + len(qkv))
        self._keys[layer, sequence, :, new] = self._apply_rope(k, norms.k_norm, new)
        self._values[layer, sequence, :, new] = self._by_head(v)
        return self._apply_rope(q, norms.q_norm, new)

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        window, first = self._shape.layers[layer].window, self._lengths[sequence]
        last = first + queries.shape[1]
        oldest = max(0, first + 1 - window) if window else 0
        seen = reference.visible(first, queries.shape[1], oldest, window, queries.device)
        keys, values = (cached[layer, sequence, :, oldest:last].float() for cached in (self._keys, self._values))
        return reference.attention(queries, keys, values, seen)

    def step(self, layer: int, qkv: Tensor, sparse: bool = False) -> Tensor:
        rows = enumerate(torch.split(qkv, 1))
        return torch.cat([self.attend(layer, self.append(layer, row, n), n, sparse) for n, row in rows])

    def advance(self, positions: int, sequence: int = 0) -> None:
        self._lengths[sequence] += positions

    def truncate(self, length: int, sequence: int = 0) -> None:
        self._lengths[sequence] = length

    def reset(self) -> None:
        self._lengths = [0] * self._shape.sequences

    def _apply_rope(self, rows: Tensor, norm: Tensor | None, positions: slice) -> Tensor:
        """Queries or keys, normed where the model does that, and rotated: [heads, S, head_dim]."""
        x = self._by_head(rows)
        if norm is not None:
            x = reference.rms_norm(x, norm, self._shape.eps)
        return reference.rotate(x, self._shape.cos[positions], self._shape.sin[positions])

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._shape.head_dim).transpose(0, 1)  # [heads, S, head_dim]

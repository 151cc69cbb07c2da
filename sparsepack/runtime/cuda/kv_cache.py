"""Keys and values on the GPU, and attention to all of them (`runtime/kv_cache.py`)."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention import MOST_GROUP, MOST_HEAD_DIM
from sparsepack.runtime.cuda.dense import Product
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.mirror import Mirror
from sparsepack.runtime.kv_cache import AttentionShape, KvCache

CACHE_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Types of cached keys and values, by the names that benchmarks print."""


class CudaKvCache(KvCache, Protocol):
    """A cache whose `step` can be captured in a CUDA graph: it reads positions on the GPU, waits for nothing, and
    computes from the same memory every time.

    positions -- [sequences]: what `lengths` are; the last kernel of a decoder's step adds one to each
    hands_on  -- `step` can take and leave words, in the order of `kernels/words.cuh`. False: it is given plain memory
                 that kernels before have written, and who reads its result waits until it has ended
    """

    @property
    def positions(self) -> Mirror: ...

    @property
    def hands_on(self) -> bool: ...

    def step(self, layer: int, qkv: Tensor, out: Tensor | None = None, handed: bool = False) -> Tensor:
        """As in `KvCache`.

        out    -- where to leave the result, `positions` being written already: nothing but kernels is put on the
                  stream then. None: memory of its own
        handed -- qkv is words (`words.py`), to be read as soon as they are written, and `out` will be read so; only
                  where it `hands_on`
        """


NewCache = Callable[[AttentionShape, str, torch.device, Kernels], CudaKvCache]
"""Makes the cache of a decoder, of a type of keys and values by its name."""


class DenseKvCache:
    """See `CudaKvCache`. Every query attends to every position that its layer's window shows it.

    `append` takes products as `dense.multiply` leaves them, or float32; its queries are of the cache's type. A position
    of a sequence takes 4 bytes * layers * kv_heads * head_dim (8 for "f32").

    Raises `UserError` for a type that is not one of `CACHE_TYPES`, and for heads that the kernels do not know.
    """

    hands_on = True

    def __init__(self, shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> None:
        _check_heads(shape)
        if type not in CACHE_TYPES:
            raise UserError(f"cache type {type!r}: expected one of {', '.join(CACHE_TYPES)}")
        self.type = type
        self.positions = Mirror(torch.zeros(shape.sequences, dtype=torch.int32, device=device), kernels)
        self._shape, self._kernels = shape, kernels
        self.lengths = [0] * shape.sequences
        room = (shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        # Each a tensor of its own, which begins at a multiple of 16 bytes whatever the context.
        self._keys, self._values = (
            [torch.zeros(room, dtype=CACHE_TYPES[type], device=device) for _ in shape.layers] for _ in range(2)
        )

    def append(self, layer: int, qkv: Product | Tensor, sequence: int = 0) -> Tensor:
        if isinstance(qkv, Tensor):
            qkv = Product(qkv, torch.ones(len(qkv), device=qkv.device), 1.0, None)
        shape, of = self._shape, self._shape.layers[layer]
        return self._kernels.split_heads(
            qkv,
            self._keys[layer][sequence, None],
            self._values[layer][sequence, None],
            shape.cos,
            shape.sin,
            self.lengths[sequence],
            heads=shape.heads,
            q_norm=of.q_norm,
            k_norm=of.k_norm,
            eps=shape.eps,
        )

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor:
        keys, values, window = self._keys[layer], self._values[layer], self._shape.layers[layer].window
        return self._kernels.prefill_attention(
            queries, keys[sequence], values[sequence], self.lengths[sequence], window
        )

    def step(self, layer: int, qkv: Tensor, out: Tensor | None = None, handed: bool = False) -> Tensor:
        shape, of = self._shape, self._shape.layers[layer]
        if out is None:
            self.positions.write(self.lengths)
            out = torch.empty(len(qkv), shape.heads * shape.head_dim, device=qkv.device)
        self._kernels.attend(
            qkv,
            self._keys[layer],
            self._values[layer],
            self.positions.there,
            shape.cos,
            shape.sin,
            out,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            window=of.window,
            q_norm=of.q_norm,
            k_norm=of.k_norm,
            eps=shape.eps,
            handed=handed,
        )
        return out

    def advance(self, positions: int, sequence: int = 0) -> None:
        self.lengths[sequence] += positions

    def truncate(self, length: int, sequence: int = 0) -> None:
        self.lengths[sequence] = length

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)


def _check_heads(shape: AttentionShape) -> None:
    group = shape.heads / shape.kv_heads
    if group > MOST_GROUP or shape.head_dim > MOST_HEAD_DIM or shape.head_dim % 2:
        raise UserError(
            f"a model with heads of {shape.head_dim} channels, {group:g} for each key head: the cuda backend "
            f"runs an even number up to {MOST_HEAD_DIM}, and up to {MOST_GROUP}; use the reference backend"
        )

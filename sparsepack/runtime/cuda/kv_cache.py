"""Keys and values on the GPU, and attention to all of them (`runtime/kv_cache.py`)."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention import MOST_GQA_RATIO, MOST_HEAD_DIM, AttentionParameters, attention_parameters
from sparsepack.runtime.cuda.dense import Product
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.mirror import Mirror
from sparsepack.runtime.kv_cache import AttentionShape, KvCache

CACHE_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Types of cached keys and values, by the names that benchmarks print."""


class CudaKvCache(KvCache, Protocol):
    """A cache whose `step` can be captured in a CUDA graph: it reads positions on the GPU, waits for nothing, and
    computes from the same memory every time.

    positions   -- [sequences]: what `lengths` are; the last kernel of a decoder's step adds one to each
    early       -- `step` can read early and be read early, in the order of `kernels/handoff.cuh`. False: it is given
                   plain memory that kernels before have written, and who reads its result waits until it has ended
    from_tokens -- of the longest text, from which on decoded tokens read a part of the cache only; None: never
    exact       -- may be set: `from_tokens` is where the policy says, also where reading everything would be faster
    """

    exact: bool

    @property
    def positions(self) -> Mirror: ...

    @property
    def early(self) -> bool: ...

    @property
    def from_tokens(self) -> int | None: ...

    def selects(self, sparse: bool) -> bool:
        """Whether the next step reads a part of the cache only: by other kernels, so that it is another graph."""

    def step(
        self, layer: int, qkv: Tensor, sparse: bool = False, out: Tensor | None = None, early_read: bool = False
    ) -> Tensor:
        """As in `KvCache`.

        out        -- where to leave the result, `positions` being written already: nothing but kernels is put on the
                      stream then. None: memory of its own
        early_read -- qkv is handed off (`handoff.py`): read as soon as it is stored, and `out` will be read so; only
                      where it is `early`
        """


NewCache = Callable[[AttentionShape, str, torch.device, Kernels], CudaKvCache]
"""Makes the cache of a decoder, of a type of keys and values by its name."""


class DenseKvCache:
    """See `CudaKvCache`. Every query attends to every position that its layer's window shows it.

    `append` takes products as `dense.multiply` leaves them, or float32; its queries are of the cache's type. A position
    of a sequence takes 4 bytes * layers * kv_heads * head_dim (8 for "f32").

    Raises `UserError` for a type that is not one of `CACHE_TYPES`, and for heads that the kernels do not know.
    """

    early = True
    exact = False

    def __init__(self, shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> None:
        _check_heads(shape)
        if type not in CACHE_TYPES:
            raise UserError(f"cache type {type!r}: expected one of {', '.join(CACHE_TYPES)}")
        self.type = type
        self._kernels = kernels
        self.positions = Mirror(torch.zeros(shape.sequences, dtype=torch.int32, device=device), kernels)
        self.lengths = [0] * shape.sequences
        self._layers = attention_parameters(shape, *self._room(shape, CACHE_TYPES[type], device))

    @property
    def from_tokens(self) -> int | None:
        return None

    def append(self, layer: int, qkv: Product | Tensor, sequence: int = 0) -> Tensor:
        if isinstance(qkv, Tensor):
            qkv = Product(qkv, torch.ones(len(qkv), device=qkv.device), 1.0, None)
        return self._kernels.split_heads(self._layers[layer], qkv, self.lengths[sequence], sequence)

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        of, first = self._layers[layer], self.lengths[sequence]
        keys, values = of.keys[sequence], of.values[sequence]
        return self._kernels.prefill_attention(queries, keys, values, first, of.layer.window)

    def step(
        self, layer: int, qkv: Tensor, sparse: bool = False, out: Tensor | None = None, early_read: bool = False
    ) -> Tensor:
        of = self._layers[layer]
        out = self._ready(of, qkv, out)
        self._kernels.attend(of, qkv, self.positions.there, out, early_read=early_read)
        return out

    def selects(self, sparse: bool) -> bool:
        return sparse and self.from_tokens is not None and max(self.lengths) + 1 >= self.from_tokens

    def advance(self, positions: int, sequence: int = 0) -> None:
        self.lengths[sequence] += positions

    def truncate(self, length: int, sequence: int = 0) -> None:
        self.lengths[sequence] = length

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)

    def _room(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where keys and values of every layer lie: each a tensor of its own, which begins at a multiple of 16 bytes
        whatever the context."""
        room = (shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        keys, values = ([torch.zeros(room, dtype=dtype, device=device) for _ in shape.layers] for _ in range(2))
        return keys, values

    def _ready(self, of: AttentionParameters, qkv: Tensor, out: Tensor | None) -> Tensor:
        """Where a step leaves its result; memory of its own where the positions are to be written, too."""
        if out is None:
            self.positions.write(self.lengths)
            out = torch.empty(len(qkv), of.shape.heads * of.shape.head_dim, device=qkv.device)
        return out


def _check_heads(shape: AttentionShape) -> None:
    ratio = shape.heads / shape.kv_heads
    if ratio > MOST_GQA_RATIO or shape.head_dim > MOST_HEAD_DIM or shape.head_dim % 2:
        raise UserError(
            f"a model with heads of {shape.head_dim} channels, {ratio:g} for each key head: the cuda backend "
            f"runs an even number up to {MOST_HEAD_DIM}, and up to {MOST_GQA_RATIO}; use the reference backend"
        )

"""Keys and values on the GPU, and attention to all cached tokens (`runtime/kv_cache.py`)."""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.records.sparse_attention import SparseFrom
from sparsepack.runtime.cuda.attention.attention import (
    MOST_GQA_RATIO,
    MOST_HEAD_DIM,
    AttentionParameters,
    attention_parameters,
)
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.driver.mirror import Mirror
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.kv_cache import AttentionShape

CACHE_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""The types of cached keys and values stand under the names that benchmarks print."""


class CudaKvCache(Protocol):
    """A cache as `KvCache`, but that positions are decoded by `step` alone. A step can be captured in a CUDA graph: it
    reads positions on the GPU, waits for nothing, and computes from the same memory every time.

    positions    -- [sequences]: what `lengths` are; the last kernel of a decoder's step adds one to each
    flag_in_data -- `step` can read and be read before a kernel has ended, in the order of
                    `kernels/common/flag_in_data.cuh`. False: it is given plain memory that kernels before have
                    written, and who reads its result waits until it has ended
    sparse_from  -- from how many tokens of the longest text on decoded ones read a part of the cache; None: never. May
                    be set, to another break-even point
    """

    sparse_from: SparseFrom | None

    @property
    def type(self) -> str: ...

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def positions(self) -> Mirror: ...

    @property
    def flag_in_data(self) -> bool: ...

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor: ...

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor: ...

    def advance(self, positions: int, sequence: int = 0) -> None: ...

    def truncate(self, length: int, sequence: int = 0) -> None: ...

    def copy(self, source: int, to: int, length: int) -> None: ...

    def turn(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None: ...

    def reset(self) -> None: ...

    def selecting(self, sparse: bool) -> int | None:
        """The least number of tokens of which the next step reads a part; None where the step reads all of every text.
        Each of these numbers has a graph of its own."""

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        """`append` and `attend` of one new position in every sequence, `positions` being written. Nothing but kernels
        is put on the stream.

        qkv          -- float32 [sequences, rows]
        sparse       -- the positions are decoded, and read no more than the shape's policy allows
        out          -- float32 [sequences, heads * head_dim]: where to leave the result
        flag_in_data -- qkv is in words of `flag_in_data.py`: read as soon as it is stored, and `out` will be read so;
                        only where the cache's `flag_in_data` is true
        """


NewCache = Callable[[AttentionShape, str, torch.device, Kernels], CudaKvCache]
"""The function makes the cache of a decoder, whose type of keys and values has the given name."""


class CudaDenseKvCache:
    """See `CudaKvCache`. Every query attends to every position that its layer's window shows it.

    `append` takes products as `gemm_fp16.multiply` leaves them; its queries are of the cache's type. A position of a
    sequence takes 4 bytes * layers * kv_heads * head_dim (8 for "f32").

    Raises `UserError` for a type that is not one of `CACHE_TYPES`, and for heads that the kernels do not know.
    """

    flag_in_data = True

    def __init__(self, shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> None:
        _check_heads(shape)
        self.type = type
        self.sparse_from: SparseFrom | None = None
        self._kernels = kernels
        self.positions = Mirror(torch.zeros(shape.sequences, dtype=torch.int32, device=device), kernels)
        self.lengths = [0] * shape.sequences
        # Kernels of all steps read this memory, whose rows may change.
        first = tuple(of.repeat(shape.sequences, 1, 1) for of in shape.tables[0]) if shape.turns else None
        self._first_table = cast("tuple[Tensor, Tensor] | None", first)
        room = self._room(shape, torch_type(type), device)
        self._layers = attention_parameters(shape, *room, self._first_table)

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        return self._kernels.split_heads(self._layers[layer], qkv, self.lengths[sequence], sequence)

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor:
        of, first = self._layers[layer], self.lengths[sequence]
        keys, values = of.keys[sequence], of.values[sequence]
        return self._prefill(queries, keys, values, first, of)

    def _prefill(self, queries: Tensor, keys: Tensor, values: Tensor, first: int, of: AttentionParameters) -> Tensor:
        shape = of.shape
        return self._kernels.prefill_attention(
            queries, keys, values, first, of.layer.window, scale=shape.scale, cap=shape.cap
        )

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        self._kernels.attend(self._layers[layer], qkv, self.positions.there, out, flag_in_data=flag_in_data)

    def selecting(self, sparse: bool) -> int | None:
        first = self.sparse_from
        return first.tokens if sparse and first is not None and max(self.lengths) + 1 >= first.tokens else None

    def advance(self, positions: int, sequence: int = 0) -> None:
        self.lengths[sequence] += positions

    def truncate(self, length: int, sequence: int = 0) -> None:
        self.lengths[sequence] = length

    def copy(self, source: int, to: int, length: int) -> None:
        for cached in (cached for of in self._layers for cached in (of.keys, of.values)):
            cached[to, :, :length].copy_(cached[source, :, :length])
        self.lengths[to] = length

    def turn(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        if self._first_table is None:
            raise ValueError("the shape says that no texts turn by rows of their own")
        for table, rows in zip(self._first_table, (cos, sin), strict=True):
            table[sequence, first : first + len(rows)].copy_(rows)

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)

    def _room(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The room for keys and values of every layer: each a tensor of its own, which begins at a multiple of 16 bytes
        whatever the context."""
        room = (shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        keys, values = ([torch.zeros(room, dtype=dtype, device=device) for _ in shape.layers] for _ in range(2))
        return keys, values


def torch_type(type: str) -> torch.dtype:
    """The type of cached keys and values with a name of `CACHE_TYPES`. Raises `UserError` for another name."""
    if type not in CACHE_TYPES:
        raise UserError(f"cache type {type!r}: expected one of {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[type]


def _check_heads(shape: AttentionShape) -> None:
    ratio = shape.heads / shape.kv_heads
    if ratio > MOST_GQA_RATIO or shape.head_dim > MOST_HEAD_DIM or shape.head_dim % 2:
        raise UserError(
            f"a model with heads of {shape.head_dim} channels, {ratio:g} for each key head: the cuda backend "
            f"runs an even number up to {MOST_HEAD_DIM}, and up to {MOST_GQA_RATIO}; use the reference backend"
        )

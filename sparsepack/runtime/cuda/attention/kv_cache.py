"""Keys and values on the GPU or in the host's memory, their labels, and attention to all cached tokens or to those that
the labels rank best (`runtime/kv_cache.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.sparse_attention import SparseFrom
from sparsepack.runtime.cuda.attention.attention import (
    MOST_GQA_RATIO,
    MOST_HEAD_DIM,
    MOST_LATENT_DIM,
    AttentionParameters,
    attention_parameters,
)
from sparsepack.runtime.cuda.attention.double_sparsity import SLOTS, DoubleSparsityParameters, break_even
from sparsepack.runtime.cuda.driver.device import Mirror
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.attention import rotate

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
    filled_up    -- up to so many first positions of a text can be appended and attend in a CUDA graph, those beyond its
                    end of whatever values: nobody reads them. 0: none
    """

    sparse_from: SparseFrom | None
    filled_up: int

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

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None: ...

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
        flag_in_data -- qkv is in words of `driver/memory.py`: read as soon as it is stored, and `out` will be read so;
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
        self.filled_up = shape.context
        self.sparse_from: SparseFrom | None = None
        self._kernels = kernels
        self.positions = Mirror(torch.zeros(shape.sequences, dtype=torch.int32, device=device), kernels)
        self.lengths = [0] * shape.sequences
        # Kernels of all steps read this memory, whose rows may change.
        first = tuple(of.repeat(shape.sequences, 1, 1) for of in shape.tables[0]) if shape.turns else None
        self._first_table = cast("tuple[Tensor, Tensor] | None", first)
        extent = self._new_keys_values(shape, torch_type(type), device)
        self._layers = attention_parameters(shape, *extent, self._first_table)

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        return self._kernels.split_heads(self._layers[layer], qkv, self.lengths[sequence], sequence)

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor:
        of, first = self._layers[layer], self.lengths[sequence]
        keys, values = of.keys[sequence], of.values[sequence]
        return self._prefill(queries, keys, values, first, of)

    def _prefill(self, queries: Tensor, keys: Tensor, values: Tensor, first: int, of: AttentionParameters) -> Tensor:
        shape = of.shape
        attended = self._kernels.prefill_attention(
            queries, keys, values, first, of.layer.window, scale=shape.scale, cap=shape.cap, sinks=of.layer.sinks
        )
        if not shape.value_dim:
            return attended
        return torch.unflatten(attended, -1, (shape.heads, -1))[..., : shape.value_dim].flatten(1)

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
        own = [of for of in self._layers if of.layer.source is None]
        for cached in (cached for of in own for cached in (of.keys, of.values)):
            cached[to, :, :length].copy_(cached[source, :, :length])
        self.lengths[to] = length

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        if self._first_table is None:
            raise ValueError("the shape says that no texts turn by rows of their own")
        for table, rows in zip(self._first_table, (cos, sin), strict=True):
            table[sequence, first : first + len(rows)].copy_(rows)

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)

    def _new_keys_values(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The room for keys and values of every layer: each a tensor of its own, or that of the layer whose it reads,
        which begins at a multiple of 16 bytes whatever the context."""
        heads = [shape.heads_of(layer) for layer in range(len(shape.layers))]
        extents = [(shape.sequences, kv_heads, shape.context, head_dim) for kv_heads, head_dim in heads]
        keys, values = list[Tensor](), list[Tensor]()
        for layer, extent in zip(shape.layers, extents, strict=True):
            for cached in (keys, values):
                own = None if layer.source is None else cached[layer.source]
                cached.append(torch.zeros(extent, dtype=dtype, device=device) if own is None else own)
        return keys, values


def torch_type(type: str) -> torch.dtype:
    """The type of cached keys and values with a name of `CACHE_TYPES`. Raises `UserError` for another name."""
    if type not in CACHE_TYPES:
        raise UserError(f"cache type {type!r}: expected one of {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[type]


def _check_heads(shape: AttentionShape) -> None:
    for kv_heads, head_dim in {shape.heads_of(layer) for layer in range(len(shape.layers))}:
        ratio = 1 if shape.latents is not None else shape.heads / kv_heads
        most = MOST_HEAD_DIM if shape.latents is None else MOST_LATENT_DIM
        if ratio > MOST_GQA_RATIO or head_dim > most or head_dim % 2:
            raise UserError(
                f"a model with heads of {head_dim} channels, {ratio:g} for each key head: the cuda backend "
                f"runs an even number up to {most}, and up to {MOST_GQA_RATIO}; use the reference backend"
            )


class CudaLatentKvCache(CudaDenseKvCache):
    """See `CudaKvCache`. Of each position a row is kept that all heads read: the part of keys that turns, turned, then
    the latent, which is values, too (`kernels/attention/attention.cu`). Steps take queries that attn_kv_b is multiplied
    into, and give latents.

    Prompts attend by whole keys and values, which `attend_prompt` takes, and which last until it returns.

    shape -- of the whole keys and values, with latents
    """

    def __init__(self, shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> None:
        latent = shape.latents
        if latent is None:
            raise ValueError("the shape has no latents")
        self._whole, self._latent = replace(shape, latents=None, sequences=1), latent
        width = latent.turning + latent.kv_rank
        one = replace(shape, kv_heads=1, head_dim=width, value_dim=latent.kv_rank, scale=shape.score_scale)
        super().__init__(one, type, device, kernels)

    def append_latents(self, layer: int, latents: Tensor, turning: Tensor, sequence: int) -> None:
        """Put the positions after a sequence's last behind those that are cached: float32 [S, kv_rank], normed, and [S,
        turning]. Counts nothing."""
        of, first = self._layers[layer], self.lengths[sequence]
        new = slice(first, first + len(latents))
        cos, sin = (table[0, new] for table in of.table)
        rows = of.keys[sequence, 0, new]
        rows[:, : self._latent.turning] = rotate(turning[None], cos, sin, self._whole.neighbours)[0]
        rows[:, self._latent.turning :] = latents

    def latents(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """What is cached of a sequence: float32 [length, kv_rank] and, turned, [length, turning]."""
        rows = self._layers[layer].keys[sequence, 0, : self.lengths[sequence]].float()
        turning, latents = torch.split(rows, [self._latent.turning, self._latent.kv_rank], dim=1)
        return latents.contiguous(), turning.contiguous()

    def attend_prompt(self, layer: int, qkv: Product, before: Tensor | None, sequence: int) -> Tensor:
        """Attention of the positions after a sequence's last: float32 [S, heads * value].

        qkv    -- [S, 3 * heads * head_dim], as `split_heads` takes them
        before -- float32 [length, 3 * heads * head_dim]: likewise of what is cached, keys turned; None: nothing is
        """
        shape, first, dtype = self._whole, self.lengths[sequence], self._layers[layer].keys.dtype
        extent = (1, shape.kv_heads, first + len(qkv.sums), shape.head_dim)
        keys, values = (torch.zeros(extent, dtype=dtype, device=qkv.sums.device) for _ in range(2))
        if before is not None:
            _, *parts = before.view(first, 3, shape.kv_heads, shape.head_dim).unbind(1)
            for cached, part in zip((keys, values), parts, strict=True):
                cached[0, :, :first] = part.transpose(0, 1)
        of = AttentionParameters(shape, shape.layers[layer], keys, values)
        return self._prefill(self._kernels.split_heads(of, qkv, first), keys[0], values[0], first, of)

    def _new_keys_values(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        extent = (shape.sequences, 1, shape.context, shape.head_dim)
        rows = [torch.zeros(extent, dtype=dtype, device=device) for _ in shape.layers]
        return rows, rows


class CudaDoubleSparsityKvCache(CudaDenseKvCache):
    """See `CudaKvCache` and `reference.double_sparsity.DoubleSparsityKvCache`, whose labels these are.

    Steps select and attend in one kernel from `sparse_from` on, in layers whose window is not shorter than that, and
    read everything before. Labels are kept in any case, kv_heads * (R / 2 + 2) bytes for a position of a layer that is
    not dense.

    break_even -- tokens of a text below which steps read everything, whatever the policy says

    Raises `UserError` as `CudaDenseKvCache` does, and for a context that the kernel has no room for.
    """

    flag_in_data = False

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        break_even: int = 0,
    ) -> None:
        if shape.policy is None:
            raise ValueError("the shape has no policy")
        self._policy = shape.policy
        super().__init__(shape, type, device, kernels)
        self.filled_up = 0  # texts for which it is made are long
        self.sparse_from = first = replace(shape.policy.sparse_from, break_even=break_even)
        # The kernel reads a whole text below the break-even point only where longer ones run beside it.
        whole = (first.tokens if shape.sequences > 1 else first.min_context) - 1
        self._double_sparsity = [self._parameters(number, whole) for number in range(len(shape.layers))]

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (of := self._double_sparsity[layer]) is not None:
            self._kernels.label_append(of, self.lengths[sequence], len(queries), sequence)
        return queries

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        of, from_tokens = self._double_sparsity[layer], self.selecting(sparse)
        if of is None:
            super().step(layer, qkv, sparse, out, flag_in_data)
        elif from_tokens is None or 0 < of.dense.layer.window < from_tokens:
            super().step(layer, qkv, sparse, out, flag_in_data)
            self._kernels.label_append(of, 0, 1, positions=self.positions.there)
        else:
            self._kernels.attend_double_sparsity(of, qkv, self.positions.there, out, min_context=from_tokens)

    def copy(self, source: int, to: int, length: int) -> None:
        super().copy(source, to, length)
        for kept in (kept for of in self._double_sparsity if of is not None for kept in (of.codes, of.scales)):
            kept[to, :, :length].copy_(kept[source, :, :length])

    def _is_sparse(self, layer: LayerAttention) -> bool:
        """Whether a step ever reads a part of the tokens that it sees."""
        return layer.channels is not None and self._policy.sparse_from.within(layer.window)

    def _parameters(self, layer: int, largest_whole: int) -> DoubleSparsityParameters | None:
        dense = self._layers[layer]
        if dense.layer.channels is None or not self._is_sparse(dense.layer):
            return None
        return self._kernels.double_sparsity_parameters(dense, dense.layer.channels, self._policy, largest_whole)


class OffloadedKvCache(CudaDoubleSparsityKvCache):
    """See `CudaDoubleSparsityKvCache`; sparse steps select tokens wherever the policy says, and have the bits of its
    steps that select. `double_sparsity.py` says how.

    Layers that read every token stay on the GPU whole. Of the others a sequence takes there, for each position and key
    head, a label and 4 bytes, for each slot a key, a value and 8 bytes, and for each token that a step reads 12 bytes.
    Prefill brings a layer's keys and values over in one piece for every `PREFILL_TOKENS` positions, into room for one
    layer's whole cache of a sequence, which all layers share; dense steps read them over the bus.

    slots -- for each token that a step reads at most, at least 1

    Raises `UserError` as `CudaDoubleSparsityKvCache` does, and where the host has no room.
    """

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        slots: float = SLOTS,
    ) -> None:
        super().__init__(shape, type, device, kernels)
        self._slots = [None if of is None else kernels.token_slots(of, slots) for of in self._double_sparsity]
        extent = (2, shape.kv_heads, shape.context, shape.head_dim)
        self._brought = torch.empty(extent, dtype=self._layers[0].keys.dtype, device=device)

    def fetched(self) -> list[int]:
        """The number of tokens of all key heads that the last step brought from the host, for each layer."""
        return [0 if of is None else int(of.missed_counts.sum()) for of in self._slots]

    def selecting(self, sparse: bool) -> int | None:
        return self._policy.min_context if sparse else None

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (slots := self._slots[layer]) is not None:
            slots.forget(sequence, self.lengths[sequence], len(queries))
        return queries

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor:
        of = self._layers[layer]
        if self._slots[layer] is None:
            return super().attend(layer, queries, sequence)
        first, window = self.lengths[sequence], of.layer.window
        seen = slice(max(0, first + 1 - window) if window else 0, first + len(queries))
        for here, cached in zip(self._brought, (of.keys, of.values), strict=True):
            here[:, seen].copy_(cached[sequence, :, seen])
        keys, values = self._brought
        return self._prefill(queries, keys, values, first, of)

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        double_sparsity, slots = self._double_sparsity[layer], self._slots[layer]
        if double_sparsity is None or slots is None:
            super().step(layer, qkv, sparse, out, flag_in_data)
        elif sparse:
            self._kernels.attend_offloaded(double_sparsity, slots, qkv, self.positions.there, out)
        else:
            super().step(layer, qkv, sparse, out, flag_in_data)
            slots.forget_next(self.positions.there)

    def copy(self, source: int, to: int, length: int) -> None:
        super().copy(source, to, length)
        for slots in (slots for slots in self._slots if slots is not None):
            slots.forget(to, 0, length)

    def _new_keys_values(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        sparse = [self._is_sparse(layer) for layer in shape.layers]
        extent = (shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        there = iter(self._kernels.host_tensors(2 * sum(sparse), extent, dtype, device))
        keys, values = (
            [next(there) if of else torch.zeros(extent, dtype=dtype, device=device) for of in sparse] for _ in range(2)
        )
        return keys, values


def new_cache(
    shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS, *, offload: bool = False
) -> CudaKvCache:
    """An empty cache: sparse where the shape has a policy, whose steps read everything while that is faster.

    offload -- of a shape with a policy: keys and values lie in the host's memory, and steps read a part of them
               wherever the policy says

    Raises `UserError` as the caches do.
    """
    if shape.latents is not None:
        return CudaLatentKvCache(shape, type, device, kernels)
    if offload:
        return OffloadedKvCache(shape, type, device, kernels)
    if shape.policy is None:
        return CudaDenseKvCache(shape, type, device, kernels)
    return CudaDoubleSparsityKvCache(shape, type, device, kernels, break_even(shape, torch_type(type)))

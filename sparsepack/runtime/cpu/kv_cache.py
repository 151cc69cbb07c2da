"""Keys and values on the CPU as float16, and attention to all of them, or to those that their labels rank best, by
native kernels (`native/decoder/kv_cache.h`, `native/decoder/double_sparsity_kv_cache.h`)."""

from typing import Any

import torch
from torch import Tensor

from sparsepack.runtime.cpu.machine import instruction_set, native, operations
from sparsepack.runtime.kv_cache import AttentionShape


class NativeKvCache:
    """See `runtime.kv_cache.KvCache`. Sequence after sequence: fp16 [layer][kv_head][context][key, value]
    [head_dim].

    Where the shape has a policy, decoded positions read the tokens that it allows; the labels by which they find them
    take channels / 2 + 2 bytes a position, key head and layer with heavy channels. Queries are the rows of `append`,
    normed and rotated in their place. Threads are torch's.

    native -- of each sequence, what a `cpu.decoder.NativeDecoder` takes

    Raises `UserError` where the kernels were not built.
    """

    type = "f16"

    def __init__(self, shape: AttentionShape) -> None:
        self.sparse_from = shape.sparse_from
        self._rows = [shape.heads * shape.heads_of(layer)[1] for layer in range(len(shape.layers))]
        self.native: list[Any] = [_native_cache(shape) for _ in range(shape.sequences)]
        for cache in self.native if shape.neighbours else ():
            cache.turn_neighbours()
        for cache in self.native if shape.query_scale is not None else ():
            cache.scale_queries(vector(shape.query_scale))

    @property
    def lengths(self) -> list[int]:
        return [int(cache.length) for cache in self.native]

    def append(self, layer: int, qkv: Tensor, sequence: int = 0) -> Tensor:
        rows = qkv.float().clone(memory_format=torch.contiguous_format)
        operations().append(self.native[sequence], layer, rows.numpy())
        return rows

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        y = torch.empty(len(queries), self._rows[layer])
        operations().attend(self.native[sequence], layer, queries.numpy(), y.numpy(), sparse)
        return y

    def advance(self, positions: int, sequence: int = 0) -> None:
        self.native[sequence].advance(positions)

    def truncate(self, length: int, sequence: int = 0) -> None:
        self.native[sequence].truncate(length)

    def copy(self, source: int, to: int, length: int) -> None:
        self.native[to].copy(self.native[source], length)

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        self.native[sequence].turn(first, cos.contiguous(), sin.contiguous())

    def reset(self) -> None:
        for cache in self.native:
            cache.reset()


def _native_cache(shape: AttentionShape) -> Any:
    dense = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "eps": shape.eps,
        "tables": [(cos.contiguous(), sin.contiguous()) for cos, sin in ((shape.cos, shape.sin), *shape.more_tables)],
        "scale": shape.score_scale,
        "cap": shape.cap,
        "layers": [
            (
                of.window,
                vector(of.q_norm),
                vector(of.k_norm),
                of.table,
                vector(of.sinks),
                of.kv_heads,
                of.head_dim,
                of.value_norm,
                -1 if of.source is None else of.source,
            )
            for of in shape.layers
        ],
        "instruction_set": instruction_set(),
    }
    policy = shape.policy
    if policy is None:
        return native().DenseKvCache(**dense)
    return native().DoubleSparsityKvCache(
        **dense,
        channels=[None if it.channels is None else it.channels.int().contiguous() for it in shape.layers],
        budgets=shape.budgets,
        sinks=min(policy.sinks, shape.context),
        recent=min(policy.recent, shape.context),
    )


def vector(x: Tensor | None) -> Tensor | None:
    """The numbers of a tensor as native code takes them: float32 [n]."""
    return None if x is None else x.detach().float().reshape(-1).contiguous()

"""The caches of every backend for tests: with each type of keys and values, and on the CPU each instruction set."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from backends import device_of, marks_of
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.runtime.backend_module import opened as opened_module
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.cpu.dispatch import FORCED
from sparsepack.runtime.cuda.attention.caches import new_cache as new_cuda_cache
from sparsepack.runtime.cuda.attention.kv_cache import DenseKvCache
from sparsepack.runtime.cuda.driver.device import usable
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.kv_cache import AttentionShape, KvCache, LayerAttention

CASES = [
    pytest.param((row.name, type, isa.values[0] if isa else None), id="-".join(parts), marks=marks)
    for row in BACKENDS.values()
    for type in row.cache_types
    for isa in (instruction_set_params() if row.name == "cpu" else [None])
    for parts, marks in [((row.name, type, *isa.values), isa.marks) if isa else ((row.name, type), marks_of(row))]
]


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    type: str

    def new_cache(self, shape: AttentionShape) -> KvCache | DenseKvCache:
        """Empty, and sparse wherever the shape's policy says."""
        there = moved(shape, self.device)
        if self.name == "cuda":
            cache = new_cuda_cache(there, self.type, usable(self.device))
            cache.sparse_from = shape.sparse_from
            assert isinstance(cache, DenseKvCache)
            return cache
        return opened_module(BACKENDS[self.name]).operations.new_cache(there, self.type, self.device)

    @property
    def tolerance(self) -> float:
        """Largest error of an output, of values up to 4. A key between two neighbours of its type may be rounded either
        way, which the softmax of a sharp head shows; GPUs compute many positions from rounded queries."""
        return {"f32": 1e-4, "f16": 1e-2, "bf16": 6e-2}[self.type]


def as_product(qkv: Tensor) -> Product:
    """Rows as prefill's products leave them on the GPU."""
    return Product(qkv.contiguous(), torch.ones(len(qkv), device=qkv.device), 1.0, None)


def appended(cache: KvCache | DenseKvCache, layer: int, qkv: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
    """What the queries of positions after a sequence's last make of the text so far: float32 [S, rows] -> [S, heads *
    head_dim]. Nothing is counted. On the GPU sparse positions are steps, one after the other."""
    if not isinstance(cache, DenseKvCache):
        return cache.attend(layer, cache.append(layer, qkv, sequence), sequence, sparse)
    if not sparse:
        return cache.attend(layer, cache.append(layer, as_product(qkv), sequence), sequence)
    before, outputs = cache.lengths[sequence], []
    for row in qkv:
        rows = torch.zeros(len(cache.lengths), len(row), device=row.device)
        rows[sequence] = row
        outputs.append(stepped(cache, layer, rows, True)[sequence])
        cache.advance(1, sequence)
    cache.truncate(before, sequence)
    return torch.stack(outputs)


def stepped(cache: KvCache | DenseKvCache, layer: int, qkv: Tensor, sparse: bool = False) -> Tensor:
    """The same for one position of every sequence, on the GPU together: [sequences, rows] -> [sequences, heads *
    head_dim]."""
    if not isinstance(cache, DenseKvCache):
        rows = enumerate(torch.split(qkv, 1))
        return torch.cat([appended(cache, layer, row, sequence, sparse) for sequence, row in rows])
    of = cache._layers[layer].shape
    cache.positions.write(cache.lengths)
    out = torch.empty(len(qkv), of.heads * of.head_dim, device=qkv.device)
    cache.step(layer, qkv, sparse, out)
    return out


def moved(shape: AttentionShape, device: str) -> AttentionShape:
    """What a cache is made for, all of it on a device."""

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    layers = tuple(
        LayerAttention(it.window, there(it.q_norm), there(it.k_norm), there(it.channels)) for it in shape.layers
    )
    return replace(shape, cos=shape.cos.to(device), sin=shape.sin.to(device), layers=layers)


def opened(name: str, type: str, isa: str | None) -> Iterator[Backend]:
    """One of the cases while the iterator lives."""
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv(FORCED, isa)
        yield Backend(name, device_of(BACKENDS[name]), type)

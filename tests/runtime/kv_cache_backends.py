"""The caches of every backend for tests: with each type of keys and values, and on the CPU each instruction set, beside
the oracle's of the same type. The metal backend's run here, too, emulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from backends import device_of, marks_of
from metal_stand_in import stand_in
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.cpu.machine import FORCED
from sparsepack.runtime.cuda.attention.kv_cache import CudaDenseKvCache
from sparsepack.runtime.cuda.attention.kv_cache import new_cache as new_cuda_cache
from sparsepack.runtime.cuda.driver.device import usable
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.decoder import load_backend_module as opened_module
from sparsepack.runtime.kv_cache import AttentionShape, KvCache, LayerAttention
from sparsepack.runtime.metal.kv_cache import MetalKvCache
from sparsepack.runtime.metal.products import Sums, new_active_columns
from sparsepack.runtime.reference.attention import rotary_table
from sparsepack.runtime.reference.backend import operations as reference_operations

CONTEXT = 150
POLICY = TokenPolicy(Fraction(1, 5), sinks=2, recent=5, min_context=16)

CASES = [
    pytest.param((row.name, type, isa.values[0] if isa else None), id="-".join(parts), marks=marks)
    for row in BACKENDS.values()
    for type in row.cache_types
    for isa in (instruction_set_params() if row.name == "cpu" else [None])
    for parts, marks in [((row.name, type, *isa.values), isa.marks) if isa else ((row.name, type), marks_of(row))]
]
CASES.append(pytest.param(("metal", "f16", "emulated"), id="metal-f16-emulated"))
SPARSE_CASES = [case for case in CASES if BACKENDS[case.values[0][0]].selects]
"""Those whose decoded positions can read a part of the tokens."""


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    type: str

    def new_cache(self, shape: AttentionShape) -> KvCache | CudaDenseKvCache:
        """Empty, and sparse wherever the shape's policy says."""
        there = moved(shape, self.device)
        if self.name == "cuda":
            cache = new_cuda_cache(there, self.type, usable(self.device))
            cache.sparse_from = shape.sparse_from
            assert isinstance(cache, CudaDenseKvCache)
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


def appended(
    cache: KvCache | CudaDenseKvCache, layer: int, qkv: Tensor, sequence: int = 0, sparse: bool = False
) -> Tensor:
    """What the queries of positions after a sequence's last make of the text so far: float32 [S, rows] -> [S, heads *
    head_dim]. Nothing is counted. On the GPU sparse positions are steps, one after the other; on Apple's a single
    position of a single text is one."""
    if isinstance(cache, MetalKvCache) and (len(qkv), len(cache.lengths)) == (1, 1):
        return metal_step(cache, layer, qkv[0])
    if not isinstance(cache, CudaDenseKvCache):
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


def stepped(cache: KvCache | CudaDenseKvCache, layer: int, qkv: Tensor, sparse: bool = False) -> Tensor:
    """The same for one position of every sequence, on the GPU together: [sequences, rows] -> [sequences, heads *
    head_dim]."""
    if not isinstance(cache, CudaDenseKvCache):
        rows = enumerate(torch.split(qkv, 1))
        return torch.cat([appended(cache, layer, row, sequence, sparse) for sequence, row in rows])
    of = cache._layers[layer].shape
    cache.positions.write(cache.lengths)
    out = torch.empty(len(qkv), of.heads * of.head_dim, device=qkv.device)
    cache.step(layer, qkv, sparse, out)
    return out


def metal_step(cache: MetalKvCache, layer: int, qkv: Tensor) -> Tensor:
    """The same for one position, by the kernels of a step: [rows] -> [1, heads * head_dim]."""
    shape, position = cache._shape, cache.lengths[0]
    parts = torch.stack([qkv / 4, qkv / 4, qkv / 2])  # as a product with three splits leaves the rows
    found = new_active_columns(shape.heads * shape.head_dim, qkv.device)
    cache.step(layer, Sums(torch.nn.functional.pad(parts, (0, -len(qkv) % 256))), position)()
    cache.collect(layer, position, found)()
    return found.values[None, : shape.heads * shape.head_dim].clone()


def moved(shape: AttentionShape, device: str) -> AttentionShape:
    """What a cache is made for, all of it on a device."""

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    of_layer = ("q_norm", "k_norm", "channels", "sinks")
    layers = tuple(replace(it, **{name: there(getattr(it, name)) for name in of_layer}) for it in shape.layers)
    scale = there(shape.query_scale)
    return replace(shape, cos=shape.cos.to(device), sin=shape.sin.to(device), layers=layers, query_scale=scale)


def load_backend_module(name: str, type: str, isa: str | None) -> Iterator[Backend]:
    """One of the cases while the iterator lives."""
    if isa == "emulated":
        with stand_in(seed=1):  # each launch has another order of threads
            yield Backend(name, "cpu", type)
        return
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv(FORCED, isa)
        yield Backend(name, device_of(BACKENDS[name]), type)


@dataclass
class Both:
    """A backend's cache and the oracle's, with the same made of them.

    key_size -- what the size of keys is multiplied by, and that of queries divided

    Where the shape has a policy, inputs are multiples of 1 / 8 that no norm or rotation changes, so that every backend
    caches the same keys, makes the same labels and must read the same tokens. Queries are short then: every token that
    is read weighs about as much, and one that is read in another's place shows.
    """

    shape: AttentionShape
    backend: Backend
    random: torch.Generator
    key_size: float = 1.0

    def __post_init__(self) -> None:
        self.ours = self.backend.new_cache(self.shape)
        self.oracle = reference_operations.new_cache(self.shape, self.backend.type)

    @property
    def decoded(self) -> bool:
        """Whether positions count as decoded unless a test says otherwise: where that makes a difference."""
        return self.shape.policy is not None

    def rows(self, count: int) -> Tensor:
        shape = self.shape
        widths = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        if shape.policy is None:
            return torch.randn(count, sum(widths), generator=self.random)
        q, k, v = (torch.randint(-24, 25, (count, width), generator=self.random) / 8 for width in widths)
        return torch.cat([q / 16 / self.key_size, k * self.key_size, v], dim=1)

    def outputs(self, cache: KvCache, layer: int, qkv: Tensor, sequence: int = 0, sparse: bool | None = None) -> Tensor:
        """What the queries of positions that are appended make of the text so far, on the host."""
        before, device = qkv.clone(), "cpu" if cache is self.oracle else self.backend.device
        found = appended(cache, layer, qkv.to(device), sequence, self.decoded if sparse is None else sparse).cpu()
        assert torch.equal(qkv, before)
        return found

    def positions(self, count: int, sequence: int = 0, sparse: bool | None = None) -> None:
        """Append so many positions in every layer, and compare what their queries make of the text so far."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(count)
            self.compare(*(self.outputs(cache, layer, qkv, sequence, sparse) for cache in (self.ours, self.oracle)))
        self.advance(count, sequence)

    def step(self) -> None:
        """One position of every sequence."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(self.shape.sequences)
            found = stepped(self.ours, layer, qkv.to(self.backend.device), self.decoded).cpu()
            self.compare(found, stepped(self.oracle, layer, qkv, self.decoded))
        for sequence in range(self.shape.sequences):
            self.advance(1, sequence)

    def advance(self, count: int, sequence: int = 0) -> None:
        for cache in (self.ours, self.oracle):
            cache.advance(count, sequence)
        assert list(self.ours.lengths) == list(self.oracle.lengths)

    def compare(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < self.backend.tolerance


def both(
    backend: Backend,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    windows: tuple[int, ...] = (0,),
    channels: tuple[int | None, ...] | None = None,
    *,
    changed: bool = False,
    key_size: float = 1.0,
    **shape: Any,
) -> Both:
    """heads    -- of queries and of keys
    channels -- heavy ones, how many of each layer, None: it is dense; None for all: there is no policy
    Skips the test where the backend's decoded positions cannot read a part of the tokens, but should.

    changed  -- whether norms change queries and keys, and rotation where there is a policy; without one it always does
    shape    -- context, sequences and policy where they are others than usual
    """
    if channels is not None and not BACKENDS[backend.name].selects:
        pytest.skip(f"the {backend.name} backend reads every token")
    random = torch.Generator()
    random.seed()  # other inputs every run

    def heavy(count: int | None) -> Tensor | None:
        if count is None:
            return None
        return torch.stack([torch.randperm(head_dim, generator=random)[:count].sort().values for _ in range(heads[1])])

    def norm() -> Tensor | None:
        return 1 + 0.2 * torch.randn(head_dim, generator=random) if changed else None

    context, policy = shape.pop("context", CONTEXT), shape.pop("policy", None if channels is None else POLICY)
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    rotates = changed or policy is None
    cos, sin = rotary_table(frequencies if rotates else torch.zeros_like(frequencies), 1.0, context)
    heavy_of = channels or (None,) * len(windows)
    layers = tuple(
        LayerAttention(window, norm(), norm(), heavy(count)) for window, count in zip(windows, heavy_of, strict=True)
    )
    made = AttentionShape(*heads, head_dim, 1e-5, cos, sin, layers, policy=policy, **shape)
    return Both(made, backend, random, key_size)

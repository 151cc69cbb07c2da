"""The caches of every backend for tests: with each type of keys and values, and on the CPU each instruction set."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from backends import device_of, marks_of
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.cpu.dispatch import FORCED
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.operations import Operations

CASES = [
    pytest.param((row.name, type, isa.values[0] if isa else None), id="-".join(parts), marks=marks)
    for row in BACKENDS.values()
    for type in row.cache_types
    for isa in (instruction_set_params() if row.name == "cpu" else [None])
    for parts, marks in [((row.name, type, *isa.values), isa.marks) if isa else ((row.name, type), marks_of(row))]
]


@dataclass(frozen=True)
class Backend:
    operations: Operations
    device: str
    type: str

    @property
    def tolerance(self) -> float:
        """Largest error of an output, of values up to 4. A key between two neighbours of its type may be rounded either
        way, which the softmax of a sharp head shows; GPUs compute many positions from rounded queries."""
        return {"f32": 1e-4, "f16": 1e-2, "bf16": 6e-2}[self.type]


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
        yield Backend(BACKENDS[name].open().operations, device_of(BACKENDS[name]), type)

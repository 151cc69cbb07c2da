"""The backends that the tests of engines run on, and how near to the stock model each comes."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_build import use_other_build
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime import backends
from sparsepack.runtime.decoder import load_backend_module
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import lacks
from sparsepack.runtime.options import EngineOptions

TOLERANCE = {name: 1e-3 if name == "reference" else 0.1 for name in backends.BACKENDS}
"""Largest difference of a logit, of logits up to 10, where rounding decides nothing (`rounding.py`). The cpu backend
keeps keys and values in half precision, which these sharp random attentions feel: 0.024 (half-precision keys and values
alone make that much of it, see cpu/test_decoder.py). The cuda backend rounds what enters the products of prefill: 0.03
(cuda/test_chain.py)."""

SHARE = {name: 1e-12 if name == "reference" else 0.01 for name in backends.BACKENDS}
"""Of a share of active columns; on the others one column in 172 may fall on the other side."""


def device_of(row: backends.Backend) -> str:
    """The device that a backend's tests run on."""
    return row.devices[0] if row.devices else "cpu"


def marks_of(row: backends.Backend) -> list[pytest.MarkDecorator]:
    """`gpu` where it needs a CUDA device, `mps` where it needs an Apple GPU; skipped where it cannot run, or on the CPU
    with SPARSEPACK_REQUIRE_KERNELS an error."""
    use_other_build()
    device = device_of(row)
    marks = {"cuda": [pytest.mark.gpu], "mps": [pytest.mark.mps]}.get(device, [])
    try:
        load_backend_module(row).usable(torch.device(device))
    except UserError as error:
        if device == "cpu" and os.environ.get("SPARSEPACK_REQUIRE_KERNELS"):
            raise
        marks.append(pytest.mark.skip(reason=str(error)))
    return marks


def every_backend_that(able: Callable[[backends.Backend], bool]) -> pytest.MarkDecorator:
    """The backends whose row says so."""
    rows = [row for row in backends.BACKENDS.values() if able(row)]
    return pytest.mark.parametrize(
        "backend", [pytest.param(row.name, id=row.name, marks=marks_of(row)) for row in rows]
    )


every_backend = every_backend_that(lambda row: True)
every_backend_of_several_texts = every_backend_that(lambda row: row.sequences > 1)


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.cpu() - b.cpu()).abs().max())


def skip_lacking(backend: str, packed: PackedModel) -> None:
    """Skip a test of a model that a backend does not compute."""
    if lacks(backends.find_backend(backend), EngineOptions(), packed):
        pytest.skip(f"the {backend} backend does not compute all of this model")


def engine_of(packed: PackedModel, backend: str, **options: Any) -> Engine:
    """An engine of a backend where that runs. On GPUs with float32 keys and values: random models are sharp."""
    row = backends.find_backend(backend)
    skip_lacking(backend, packed)
    if "f32" in row.cache_types:
        options = {"cache_type": "f32", **options}
    return Engine(packed, backend=backend, **{"device": device_of(row), **options})

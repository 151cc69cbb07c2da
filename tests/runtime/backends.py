"""The backends that the tests of engines run on, and how near to the stock model each comes."""

from typing import Any

import pytest
import torch
from native_build import instruction_set_params

from sparsepack.models.packed import PackedModel
from sparsepack.runtime.engine import Engine

TOLERANCE = {"reference": 1e-3, "cpu": 0.1, "cuda": 0.1}
"""Largest difference of a logit, of logits up to 10. The cpu backend keeps keys and values in half precision, which
these sharp random attentions feel: 0.024 without a flip (half-precision keys and values alone make that much of it, see
cpu/test_decoder.py), 0.08 measured where an input within that of its threshold falls on the other side. The cuda
backend rounds what enters the products of prefill: 0.025 without a flip, 0.07 with one (cuda/test_chain.py)."""

SHARE = {"reference": 1e-12, "cpu": 0.01, "cuda": 0.01}
"""Of a share of active columns; on the others one column in 172 may fall on the other side."""

BACKENDS = [
    pytest.param("reference", id="reference"),
    pytest.param("cpu", id="cpu", marks=instruction_set_params()[0].marks),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def engine_of(packed: PackedModel, backend: str, **options: Any) -> Engine:
    """An engine of a backend where that runs. On GPUs with float32 keys and values: random models are sharp."""
    if backend == "cuda":
        options = {"device": "cuda", "cache_type": "f32", **options}
    return Engine(packed, backend=backend, **options)

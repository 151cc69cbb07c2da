"""The oracle's products and caches, as decoders take them (`runtime/operations.py`)."""

import torch

from sparsepack.runtime.double.reference import DoubleKvCache
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.reference import (
    collect,
    load_neurons,
    load_rows,
    load_zigzag,
    matmul,
    neuron_ffn,
    neuron_matmul,
    zigzag_gemv,
    zigzag_matmul,
)
from sparsepack.runtime.reference_kv_cache import DenseKvCache

__all__ = [
    "collect",
    "load_neurons",
    "load_rows",
    "load_zigzag",
    "matmul",
    "neuron_ffn",
    "neuron_matmul",
    "new_kv_cache",
    "zigzag_gemv",
    "zigzag_matmul",
]


def new_kv_cache(shape: AttentionShape, device: torch.device | str = "cpu", type: str | None = None) -> KvCache:
    """An empty cache, sparse where the shape has a policy: of float32, or to compare with another backend's, of "f16"
    or "bf16"."""
    return (DenseKvCache if shape.policy is None else DoubleKvCache)(shape, device, type or "f32")

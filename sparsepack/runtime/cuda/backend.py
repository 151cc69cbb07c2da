"""The backend of NVIDIA GPUs; see `runtime.backends.BackendModule`."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from sparsepack.models.packed import PackedModel
from sparsepack.runtime.cuda import batch as of_batches
from sparsepack.runtime.cuda import decoder as of_one
from sparsepack.runtime.cuda import device as gpu
from sparsepack.runtime.cuda import operations
from sparsepack.runtime.cuda.caches import new_cache
from sparsepack.runtime.cuda.double.offloaded_kv_cache import OffloadedKvCache
from sparsepack.runtime.cuda.tune import measure
from sparsepack.runtime.tuning import Shape

__all__ = ["batch_decoder", "decoder", "describe", "operations", "synchronise", "tune", "usable"]


def usable(device: torch.device) -> None:
    gpu.usable(device)


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    threads: int | None,
    cache_type: str,
    *,
    offload: bool = False,
) -> of_one.CudaDecoder:
    cache = OffloadedKvCache if offload else new_cache
    return of_one.CudaDecoder(packed, device, context, cache_type=cache_type, new_cache=cache)


def batch_decoder(
    packed: PackedModel, device: torch.device, context: int, sequences: int, cache_type: str, *, offload: bool = False
) -> of_batches.CudaBatch:
    cache = OffloadedKvCache if offload else new_cache
    return of_batches.CudaBatch(packed, device, context, sequences, cache_type=cache_type, new_cache=cache)


def synchronise(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape]
) -> dict[str, Any]:
    """See `cuda.tune.measure`."""
    return measure(shapes, device, gates)

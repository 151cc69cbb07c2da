"""The backend of Apple GPUs; see `runtime.backend_module.BackendModule`."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.metal import library
from sparsepack.runtime.metal.decoder import MetalDecoder
from sparsepack.runtime.metal.operations import operations
from sparsepack.runtime.metal.products import gpu_name
from sparsepack.runtime.metal.tune import measure
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape

__all__ = ["decoder", "describe", "operations", "synchronise", "tune", "usable"]


def usable(device: torch.device) -> None:
    library.usable(device)


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> MetalDecoder:
    return MetalDecoder(packed, library.usable(device), context)


def synchronise(device: torch.device) -> None:
    torch.mps.synchronize()


def describe(device: torch.device) -> str:
    return gpu_name()


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape]
) -> dict[str, Any]:
    """See `metal.tune.measure`."""
    return measure(shapes, library.usable(device), gates)

"""The backend of NVIDIA GPUs; see `runtime.backend_module.BackendModule`."""

import gc
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, cast

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.attention.caches import new_cache
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.cuda.driver import device as gpu
from sparsepack.runtime.cuda.driver.memory import within_budget
from sparsepack.runtime.cuda.links import measure as measure_links
from sparsepack.runtime.cuda.links import measured_links
from sparsepack.runtime.cuda.products.tune import measure
from sparsepack.runtime.hybrid.cuda_decoder import CudaHybridDecoder
from sparsepack.runtime.hybrid.far_decoder import CudaFarDecoder
from sparsepack.runtime.hybrid.plan import planned
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape

__all__ = ["decoder", "describe", "synchronise", "tune", "tune_links", "usable"]


def usable(device: torch.device) -> None:
    gpu.usable(device)


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> cuda_decoder.CudaDecoder:
    gc.collect()  # what a decoder before had lies in cycles, and would be there twice, pinned memory of the host too
    cache = partial(new_cache, offload=options.offload)
    texts = options.sequences or 1
    if not options.divided_by:
        return cuda_decoder.CudaDecoder(packed, device, context, texts, cache_type, new_cache=cache)
    plan, device = planned(packed, context, cache_type, options), gpu.usable(device)
    with within_budget(plan, device):
        if plan.whole and options.cached is None:
            return cuda_decoder.CudaDecoder(packed, device, context, texts, cache_type, new_cache=cache, plan=plan)
        measured = measured_links(options.threads, packed.architecture.hidden, device)
        if not packed.mlp_kind.by_count:
            return CudaFarDecoder(
                *(packed, operations, device, context, cache_type, options, plan, measured), new_cache=cache
            )
        slow, activity = operations.slow_policy(), cast(Any, options.activity)
        return CudaHybridDecoder(
            packed,
            operations,
            device,
            context,
            cache_type,
            options,
            plan,
            measured,
            slow,
            new_cache=cache,
            activity=activity,
        )


def synchronise(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape]
) -> dict[str, Any]:
    """See `cuda.tune.measure`."""
    return measure(shapes, device, gates)


def tune_links(widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
    """See `cuda.links.measure`."""
    return measure_links(widths, device, threads)

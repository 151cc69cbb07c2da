"""The backend of NVIDIA GPUs; see `runtime.decoder.BackendModule`."""

import gc
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, cast

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.progress import say
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.attention.kv_cache import new_cache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.decoder.self_check import check_unknown
from sparsepack.runtime.cuda.driver import device as gpu
from sparsepack.runtime.cuda.driver.memory import within_budget
from sparsepack.runtime.cuda.products.tune import measure
from sparsepack.runtime.hybrid.bandwidth import load_profile
from sparsepack.runtime.hybrid.bandwidth import measure as measure_links
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.hybrid.plan import make_plan
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape

__all__ = ["decoder", "describe", "synchronise", "tune", "tune_bandwidth", "usable"]


def usable(device: torch.device) -> None:
    gpu.usable(device)


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> CudaDecoder:
    gc.collect()  # what a decoder before had lies in cycles, and would be there twice, pinned memory of the host too
    of_decoder = (packed, device, context, options.sequences or 1, cache_type)
    cache = partial(new_cache, offload=options.offload)
    if not options.divided_by:
        whole = CudaDecoder(*of_decoder, new_cache=cache)
        if line := check_unknown(whole):
            say(line)
        return whole
    plan, device = make_plan(packed, context, cache_type, options), gpu.usable(device)
    with within_budget(plan, device):
        cpu_gpu = None
        if not plan.whole or options.cached is not None:
            measured = load_profile(options.threads, packed.architecture.hidden, device)
            slow, activity = operations.slow_policy(), cast(Any, options.activity)
            cpu_gpu = CpuGpu(packed, operations, device, options, plan, measured, slow, activity=activity)
        return CudaDecoder(*of_decoder, new_cache=cache, plan=plan, cpu_gpu=cpu_gpu)


def synchronise(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape], block: str
) -> dict[str, Any]:
    """See `cuda.tune.measure`."""
    return measure(shapes, device, gates, block)


def tune_bandwidth(widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
    """See `hybrid.bandwidth.measure`."""
    return measure_links(widths, device, threads)

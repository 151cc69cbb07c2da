"""Decoders on a GPU with the processor beside it, for tests."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from packed_models import by_neurons, random_model
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.hybrid.plan import make_plan
from sparsepack.runtime.options import EngineOptions

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1))
ROUNDED = 0.1
EVEN = BandwidthProfile(3.0, 1.0, 1.0)
LINKS = {
    "both": EVEN,
    "bus alone": BandwidthProfile(1.0, 1.0, 1.0, handover=1e9),
    "processor alone": BandwidthProfile(1.0, 1e-9, 1.0),
}


@cache
def model(**changes: Any) -> PackedModel:
    size = {"hidden_size": 256, "intermediate_size": 300, "hidden_act": "relu", "row_scales": True, **changes}
    return by_neurons(random_model("llama", **size))


def decoder(
    packed: PackedModel,
    kernels: Kernels,
    cached: float,
    bandwidth: BandwidthProfile | None = EVEN,
    activity: Tensor | None = None,
    plan: Plan | None = None,
    measured: BandwidthProfile | None = None,
    context: int = 128,
    slow: Callable[..., Any] | None = None,
    **options: Any,
) -> CudaDecoder:
    chosen = EngineOptions(device="cuda", cached=cached, threads=2, bandwidth=bandwidth, **options)
    device = torch.device("cuda")
    plan = plan or make_plan(packed, context, "f32", chosen)
    cpu_gpu = CpuGpu(packed, operations, device, chosen, plan, measured, slow, kernels, activity)
    return decoder_of(packed, context, chosen, kernels, plan, cpu_gpu)


def within_budget(
    packed: PackedModel, kernels: Kernels, plan: Plan, bandwidth: BandwidthProfile = EVEN, **options: Any
) -> CudaDecoder:
    """A decoder of a model within a budget, 128 tokens of context."""
    chosen = EngineOptions(device="cuda", vram="8GB", threads=2, bandwidth=bandwidth, **options)
    cpu_gpu = CpuGpu(packed, operations, torch.device("cuda"), chosen, plan, kernels=kernels)
    return decoder_of(packed, 128, chosen, kernels, plan, cpu_gpu)


def decoder_of(
    packed: PackedModel, context: int, options: EngineOptions, kernels: Kernels, plan: Plan, cpu_gpu: CpuGpu
) -> CudaDecoder:
    """The decoder of what GPU and processor compute together."""
    texts, device = options.sequences or 1, torch.device("cuda")
    return CudaDecoder(packed, device, context, texts, "f32", kernels, plan=plan, cpu_gpu=cpu_gpu)

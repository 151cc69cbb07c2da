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
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.hybrid.cuda_decoder import CudaHybridDecoder
from sparsepack.runtime.hybrid.plan import planned
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
    links: BandwidthProfile | None = EVEN,
    activity: Tensor | None = None,
    plan: Plan | None = None,
    measured: BandwidthProfile | None = None,
    context: int = 128,
    slow: Callable[..., Any] | None = None,
    **options: Any,
) -> CudaHybridDecoder:
    chosen = EngineOptions(device="cuda", cached=cached, threads=2, links=links, **options)
    device = torch.device("cuda")
    plan = plan or planned(packed, context, "f32", chosen)
    given = {"measured": measured, "slow": slow, "kernels": kernels, "activity": activity}
    return CudaHybridDecoder(packed, operations, device, context, "f32", chosen, plan, **given)

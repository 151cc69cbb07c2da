"""What the tests of CUDA kernels share."""

from collections.abc import Iterator
from typing import Any

import pytest
import simulated
import torch
from emulated import Emulation

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.backends import Backend
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda import backend
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.driver.memory import SENTINEL, workspace
from sparsepack.runtime.cuda.products import zigzag_products
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.hybrid.plan import make_plan
from sparsepack.runtime.options import EngineOptions

LINKS = BandwidthProfile(resident=5e8, bus=1e7, worker=1e7, handover=1e-6, near=1e9, far_bus=1e8, far_worker=1e8)


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Those of a GPU, and what they mean in plain torch on the CPU."""
    with torch.no_grad():
        if request.param == "gpu":
            yield KERNELS
            return
        with simulated.launches():
            yield simulated.KERNELS


@pytest.fixture
def simulated_launches() -> Iterator[None]:
    """What would be launched on a GPU runs on the CPU."""
    with simulated.launches(), torch.no_grad():
        yield


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    """Kernels that the processor runs."""
    return Emulation()


@pytest.fixture
def workspace_is_reset() -> Iterator[None]:
    """Kernels leave the words where their blocks meet as they found them."""
    yield
    if torch.cuda.is_available():
        assert bool((workspace(torch.device("cuda", torch.cuda.current_device())) == SENTINEL).all())


@pytest.fixture
def no_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of older GPUs runs on newer ones, too."""
    macros = zigzag_products._macros
    monkeypatch.setattr(zigzag_products, "_macros", lambda *args: {**macros(*args), "BULK": 0})


@pytest.fixture
def simulated_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose kernels are plain torch on the CPU; what only asks torch of its GPU says nothing."""

    def decoder(
        packed: PackedModel, device: torch.device, context: int, cache_type: str, options: EngineOptions
    ) -> CudaDecoder:
        of_decoder = packed, device, context, 1, cache_type, simulated.KERNELS
        if not options.divided_by:
            return CudaDecoder(*of_decoder)
        plan, slow, activity = (
            make_plan(packed, context, cache_type, options),
            operations.slow_policy(),
            options.activity,
        )
        of_both: Any = (packed, operations, device, options, plan, LINKS, slow, simulated.KERNELS, activity)
        return CudaDecoder(*of_decoder, plan=plan, cpu_gpu=CpuGpu(*of_both))

    for name, value in {"decoder": decoder, "usable": None, "synchronise": None, "describe": None}.items():
        monkeypatch.setattr(backend, name, value or (lambda device: "simulated"))
    monkeypatch.setattr(Backend, "check_device", lambda row, device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with simulated.launches():
        yield

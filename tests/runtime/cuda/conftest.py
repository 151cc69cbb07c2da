"""What the tests of CUDA kernels share."""

from collections.abc import Iterator

import pytest
import simulated
import torch
from emulated import Emulation

from sparsepack.runtime.cuda.driver.flag_in_data import SENTINEL, workspace
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.products import zigzag_products


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
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Kernels that the processor runs."""
    return Emulation(tmp_path_factory.mktemp("emulated"))


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

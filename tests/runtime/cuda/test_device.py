"""Where the cuda backend runs, and what is said where it cannot; without a GPU."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_models import by_neurons, random_model

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver import device
from sparsepack.runtime.cuda.driver.device import usable
from sparsepack.runtime.cuda.driver.kernel import architecture, nvrtc_version
from sparsepack.runtime.decoder import choose_backend
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two GPUs of compute capability 9.0, a driver for CUDA 13.0, and NVRTC 13.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(device, "nvrtc_version", lambda: "13.0")
    driver_of(monkeypatch, 13000)
    architecture.cache_clear()
    yield
    architecture.cache_clear()


def driver_of(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, version))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))


def chosen() -> tuple[str, tuple[str, ...]]:
    return choose_backend(EngineOptions("cuda"), random_model("llama"))


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_runs_the_cuda_backend() -> None:
    assert chosen() == ("cuda", ())
    assert usable("cuda") == torch.device("cuda:1")
    assert usable("cuda:0") == torch.device("cuda:0")


@pytest.mark.usefixtures("_gpu")
def test_without_cuda_core_the_reference_runs_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "nvrtc_version", nvrtc_version)
    nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    backend, (note,) = chosen()
    assert backend == "reference"
    assert note.startswith("note: the reference backend runs: the cuda backend needs cuda.core")
    assert "pip install 'sparsepack[cuda]'" in note
    with pytest.raises(UserError, match=r"needs cuda\.core"):
        Engine(random_model("llama"), device="cuda", backend="cuda")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("asked", [{"vram": "8GB"}, {"cached": 0.3}, {"offload": True}])
def test_what_the_reference_does_not_do_is_refused_with_the_reason(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_of(monkeypatch, 12080)
    packed = by_neurons(random_model("llama", hidden_size=256, hidden_act="relu"))
    with pytest.raises(UserError, match="the GPU's driver knows CUDA 12"):
        Engine(packed, device="cuda", **asked)


@pytest.mark.usefixtures("_gpu")
def test_an_older_gpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    architecture.cache_clear()
    assert "a GPU of compute capability 7.5" in chosen()[1][0]


@pytest.mark.usefixtures("_gpu")
def test_a_driver_older_than_the_compiler_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_of(monkeypatch, 12080)
    backend, (note,) = chosen()
    assert backend == "reference"
    assert "driver knows CUDA 12.8, and NVRTC is 13.0: update the driver" in note
    monkeypatch.setattr(device, "nvrtc_version", lambda: "12.9")
    assert chosen() == ("cuda", ())


@pytest.mark.usefixtures("_gpu")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match="this machine has 2 CUDA devices; expected at most cuda:1"):
        usable("cuda:2")


def test_the_cuda_backend_runs_on_gpus_only() -> None:
    with pytest.raises(UserError, match=r"device cpu: the cuda backend runs on NVIDIA GPUs; use device cuda"):
        Engine(random_model("llama"), backend="cuda")
    assert choose_backend(EngineOptions(backend="cuda"), random_model("llama")) == ("cuda", ())


def test_other_backends_have_one_type_of_cache() -> None:
    with pytest.raises(UserError, match=r"cache type .f16.: the reference backend has f32"):
        Engine(random_model("llama"), backend="reference", cache_type="f16")

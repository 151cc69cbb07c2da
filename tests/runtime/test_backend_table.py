"""The table of backends: what a row says is so, and reading it costs nothing."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from backends import device_of

from sparsepack.errors import UserError
from sparsepack.runtime.backends import BACKENDS, Backend, backend_for
from sparsepack.runtime.decoder import load_backend_module
from sparsepack.runtime.features import check_features, requested_backend, tuning_backend
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference.backend import operations as reference_operations

every_row = pytest.mark.parametrize("row", BACKENDS.values(), ids=BACKENDS)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["eval", "--help"], ["bench", "--help"]])
def test_help_names_the_backends_without_importing_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom sparsepack.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@every_row
def test_a_module_offers_what_its_row_says(row: Backend) -> None:
    module = load_backend_module(row)
    for name in ("usable", "decoder", "synchronise", "describe"):
        assert callable(getattr(module, name))
    assert hasattr(module, "tune") == bool(row.tunes)
    assert hasattr(module, "tune_bandwidth") == bool(row.tunes and row.slots)


def test_a_device_has_the_backend_that_is_made_for_it() -> None:
    found = {device: backend_for(device).name for device in ("cpu", "cuda", "cuda:1", "mps", "xpu")}
    assert found == {"cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda", "mps": "metal", "xpu": "reference"}
    assert backend_for(torch.device("cuda", 3)).name == "cuda"


@every_row
def test_a_backend_refuses_devices_that_it_is_not_made_for(row: Backend) -> None:
    row.check_device(device_of(row))
    if not row.devices:
        row.check_device("xpu")
        return
    with pytest.raises(UserError, match=f"device xpu: the {row.name} backend runs on .*; use device {row.devices[0]}"):
        row.check_device(torch.device("xpu"))


@every_row
def test_a_cache_type_that_a_backend_does_not_have_is_an_error(row: Backend) -> None:
    assert row.choose_cache_type(None) == row.cache_types[0]
    assert all(row.choose_cache_type(type) == type for type in row.cache_types)
    with pytest.raises(UserError, match=f"cache type 'f8': the {row.name} backend has {row.cache_types[0]}"):
        row.choose_cache_type("f8")


def test_batches_and_tuning_are_refused_where_no_backend_does_them() -> None:
    assert requested_backend(EngineOptions("cuda", sequences=8)).name == "cuda"
    toy = replace(backend_for("xpu"), name="toy", sequences=1)
    with pytest.raises(UserError, match="a batch of 2 by the toy backend: it runs at most 1 together; use backend ref"):
        check_features(toy, EngineOptions(sequences=2))
    with pytest.raises(UserError, match="a batch of 9 sequences: expected 1 to 8"):
        requested_backend(EngineOptions("cuda", sequences=9))
    assert tuning_backend(EngineOptions("cpu")).name == "cpu"
    with pytest.raises(UserError, match="device xpu: the reference backend has nothing to tune; use device cpu"):
        tuning_backend(EngineOptions("xpu"))


def test_the_reference_waits_for_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    module = load_backend_module(backend_for("xpu"))
    module.synchronise(torch.device("cpu"))
    assert waited == []
    module.synchronise(torch.device("xpu"))
    assert waited == [torch.device("xpu")]
    assert module.operations is reference_operations
    assert module.describe(torch.device("cpu")) == ""

"""The examples of docs/backends.md, run as they stand there."""

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from packed_models import random_model

from sparsepack.cli import main
from sparsepack.runtime import backends
from sparsepack.runtime.backends import Backend
from sparsepack.runtime.decoder import BackendModule
from sparsepack.runtime.engine import Engine

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The backend of the page, in the table; its module."""
    source, row, cache = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    backend: Backend = eval(row, {"Backend": Backend})
    module = types.ModuleType(backend.module)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, backend.module, module)
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, backend.name: backend})
    vars(module)["__cache__"] = cache
    return module


@pytest.mark.usefixtures("toy")
def test_the_smallest_backend_runs_a_model() -> None:
    packed = random_model("llama")
    engine = Engine(packed, backend="toy")
    assert engine.description.startswith("toy, ")
    assert torch.equal(engine.teacher_forced(IDS, 4), Engine(packed, backend="reference").teacher_forced(IDS, 4))
    engine.synchronise()


def test_another_attention_is_another_cache(toy: types.ModuleType) -> None:
    exec(vars(toy)["__cache__"], vars(toy))
    packed = random_model("llama")
    windows = dataclasses.replace(packed.architecture, sliding_windows=(4,) * packed.architecture.layers)
    expected = Engine(dataclasses.replace(packed, architecture=windows), backend="reference").teacher_forced(IDS, 4)
    found = Engine(packed, backend="toy").teacher_forced(IDS, 4)
    assert (found - expected).abs().max() < 1e-4
    assert (found - Engine(packed, backend="reference").teacher_forced(IDS, 4)).abs().max() > 0.1


def test_the_page_names_what_a_module_offers() -> None:
    offered: Any = BackendModule.__dict__.keys() | BackendModule.__annotations__.keys()
    wanted = {name for name in offered if not name.startswith("_")}
    rows = set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE))
    assert wanted | {field.name for field in dataclasses.fields(Backend)} == rows


def test_every_backend_can_be_asked_for_on_the_command_line() -> None:
    for verb, option in (("generate", "--backend"), ("bench", "--backend"), ("eval", "--backend")):
        text = CliRunner().invoke(main, [verb, "--help"]).stdout.replace("\n", "")
        choices = re.search(rf"{option} \[([^\]]*)\]", text)
        assert choices is not None
        assert set(backends.BACKENDS) <= {name.strip() for name in choices[1].split("|")}

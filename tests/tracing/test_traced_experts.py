"""Traces whose units are experts: what the router gave, and the policies that play it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.cli.app import main
from sparsepack.errors import PlacementError
from sparsepack.files.text import Text
from sparsepack.inspection import kind_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.stock.whole import load_model
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate
from sparsepack.tracing.collect import trace
from sparsepack.tracing.options import TraceOptions
from sparsepack.tracing.trace import Trace

OPTIONS = TraceOptions(sessions=2, tokens=48, prompt=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("experts") / "m", "mixtral"))


@pytest.fixture(scope="module")
def traced(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("experts") / "t"
    return trace(model, Text("t", (TEXT[:2000], TEXT[4000:6000]), "t"), path, OPTIONS)


@pytest.fixture(scope="module")
def calibration(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "c"
    calibrate(model, Text("c", (TEXT[9000:14000],), "c"), path, CalibrateOptions(context=48, samples=4))
    return path


def test_the_experts_of_each_token_are_the_stock_routers(model: Checkpoint, traced: Trace) -> None:
    stock = load_model(model)
    seen: list[torch.Tensor] = []
    for layer in stock.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    assert traced.unit == "experts"
    assert traced.neurons == 8
    for session in range(2):
        seen.clear()
        with torch.inference_mode():
            stock(torch.from_numpy(traced.ids(session).astype(np.int64))[None])
        for layer, chosen in enumerate(seen):
            expected = torch.zeros(len(chosen), 8, dtype=torch.bool).scatter_(1, chosen, True)
            assert np.array_equal(traced.active(session, layer), expected.numpy())


def test_policies_play_experts(traced: Trace, calibration: Path) -> None:
    found = simulate(traced, calibration, SimulateOptions(cached="0.25,1.0"))
    assert found["unit"] == "experts"
    assert found["density"] == pytest.approx(2 / 8)
    assert found["neurons"] == 2 * 8
    for row in found["results"]:
        assert row["needed"] == pytest.approx(2 * 2)  # of each token, in two blocks
        if row["cached"] == 1:
            assert row["hit_rate"]["value"] == 1
        else:
            assert 0 < row["hit_rate"]["value"] < 1


def test_what_is_of_neurons_alone_is_one_line(model: Checkpoint, traced: Trace, calibration: Path) -> None:
    with pytest.raises(PlacementError, match=r"it traces experts.*; leave --machine and --vram out"):
        simulate(traced, calibration, SimulateOptions(machine="pcie4"))
    text = Text("t", (TEXT[:2000],), "t")
    with pytest.raises(PlacementError, match=r"its MLPs have experts.*; leave --share and --calibration out"):
        trace(model, text, traced.path.parent / "other", TraceOptions(sessions=1, tokens=16, prompt=4, share=0.3))


def test_inspect_names_experts(traced: Trace, calibration: Path) -> None:
    for path in (traced.path, calibration):
        assert kind_of(path).read(path)["neurons"]["unit"] == "experts"
        shown = CliRunner().invoke(main, ["inspect", str(path)])
        assert shown.exit_code == 0, shown.output
        assert "experts, over" in shown.output
        assert "neurons" not in shown.output

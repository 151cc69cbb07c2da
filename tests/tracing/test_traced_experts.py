"""Traces whose units are experts: what the router gave, and the policies that play it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.trace_file import Trace, calibration_or_trace, neuron_counts
from sparsepack.calibrate.tracing import trace
from sparsepack.cli.app import main
from sparsepack.errors import PlacementError
from sparsepack.files.text import Text
from sparsepack.formats.open import read_packed
from sparsepack.inspection import detect_kind
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.model import load_model
from sparsepack.packing import PackRequest, pack
from sparsepack.placement.budget import plan_within
from sparsepack.placement.machine import MACHINES, SHAPES, seconds_per_token
from sparsepack.placement.options import PlaceOptions
from sparsepack.placing import place
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate

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


def test_a_machine_says_how_fast_a_mixture_decodes(traced: Trace, calibration: Path) -> None:
    options = SimulateOptions(machine="pcie5", vram="8GB", policy="static,lru")
    found = simulate(traced, calibration, options)
    assert found["machine"]["shape"] == "30b-a3b"
    shape = SHAPES["30b-a3b"]
    parts = shape.parts
    room = 8e9 - parts.cache - parts.work_within(8_000_000_000).bytes
    room -= parts.output + sum(parts.attention) + sum(parts.gates)
    slots = int(room / parts.record) - max(shape.used, 2)  # as many are spare as a token has
    rates = MACHINES["pcie5"].rates(parts.record)
    for row in found["results"]:
        assert row["cached"] == pytest.approx(slots / (48 * 128), rel=0.02)
        speeds = row["tokens_per_second"]
        assert speeds["and_bus"] >= speeds["processor"] > 0
        moved = row["moves"] / row["needed"] * 8 / 128
        given = (rates, plan_within(parts, 8_000_000_000), 8 / 128, row["hit_rate"]["value"], moved)
        assert speeds["processor"] == pytest.approx(seconds_per_token(*given, over_the_bus=False).rate)
    large = simulate(traced, calibration, SimulateOptions(cached="0.25", machine="pcie5", shape="8x7b"))
    assert large["results"][0]["tokens_per_second"]["processor"] < found["results"][0]["tokens_per_second"]["processor"]


def test_what_is_of_neurons_alone_is_one_line(model: Checkpoint, traced: Trace, calibration: Path) -> None:
    with pytest.raises(PlacementError, match=r"--shape 13b: .* the trace is of experts; give 30b-a3b or 8x7b"):
        simulate(traced, calibration, SimulateOptions(machine="pcie4", shape="13b"))
    text = Text("t", (TEXT[:2000],), "t")
    with pytest.raises(PlacementError, match=r"its MLPs have experts.*; leave --share and --calibration out"):
        trace(model, text, traced.path.parent / "other", TraceOptions(sessions=1, tokens=16, prompt=4, share=0.3))


def test_inspect_names_experts(traced: Trace, calibration: Path) -> None:
    for path in (traced.path, calibration):
        assert detect_kind(path).read(path)["neurons"]["unit"] == "experts"
        shown = CliRunner().invoke(main, ["inspect", str(path)])
        assert shown.exit_code == 0, shown.output
        assert "experts, over" in shown.output
        assert "neurons" not in shown.output


@pytest.fixture(scope="module")
def packed(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "m.gguf"
    pack(PackRequest(model=str(model.path), output=path))
    return path


def budget_for(packed: Path, calibration: Path, slots: int) -> PlaceOptions:
    """Room for everything but for all experts beside so many and the spare ones."""
    record = sum(matrix.blocks.nbytes // 8 for matrix in read_packed(packed).layers[0].mlp.matrices.values())
    least = place(packed, PlaceOptions(vram="1GB", context=64), calibration)
    rest = sum(size for name, size in least["card"].items() if name not in ("records", "embedding"))
    return PlaceOptions(vram=f"{(rest + (slots + 2.5) * record) / 1e6:.3f}MB", context=64)


def test_place_gives_slots_to_the_experts_that_are_used_most(packed: Path, calibration: Path, traced: Trace) -> None:
    for source in (calibration, traced.path):
        frequency = neuron_counts(calibration_or_trace(source)).frequency.numpy()
        found = place(packed, budget_for(packed, source, 5), source)
        assert found["unit"] == "experts"
        assert found["neurons"] == 8
        assert sum(found["slots"]) == 5
        assert found["density"] == pytest.approx(2 / 8)
        best = np.sort(frequency.ravel())[::-1][:5].sum()
        assert found["hit_rate"] == pytest.approx(best / frequency.sum())
        assert sum(found["card"].values()) <= found["vram"]
        assert found["blocks"]["gates"] == 2


def test_more_slots_for_experts_are_faster_and_all_need_no_host(packed: Path, calibration: Path) -> None:
    some, more = (place(packed, budget_for(packed, calibration, slots), calibration) for slots in (2, 9))
    whole = place(packed, PlaceOptions(vram="1GB", context=64), calibration)
    speeds = [found["tokens_per_second"]["processor"] for found in (some, more, whole)]
    assert sorted(set(speeds)) == speeds
    assert whole["hit_rate"] == 1
    assert not sum(whole["host"].values())
    shown = CliRunner().invoke(main, ["place", str(packed), "--vram", "1GB", "--calibration", str(calibration)])
    assert shown.exit_code == 0, shown.output
    assert "16 of 16 experts" in shown.output
    assert "routers" in shown.output
    assert "neurons" not in shown.output


def test_a_shared_expert_is_always_read_and_has_no_slots(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen2_moe", num_hidden_layers=1)
    calibrate(folder, Text("c", (TEXT[:4000],), "c"), tmp_path / "c", CalibrateOptions(context=32, samples=2))
    pack(PackRequest(model=str(folder), output=tmp_path / "m.gguf"))
    found = place(tmp_path / "m.gguf", PlaceOptions(vram="1GB", context=64), tmp_path / "c")
    mlp = read_packed(tmp_path / "m.gguf").layers[0].mlp
    record = sum(matrix.blocks.nbytes // 10 for matrix in mlp.matrices.values())
    assert found["slots"] == [8]
    assert found["card"]["records"] == 8 * record
    assert found["card"]["gates"] == 2 * record + 4 * 256 * (8 + 1)


def test_places_without_counts_of_this_model_are_one_line(packed: Path, calibration: Path, tmp_path: Path) -> None:
    options = PlaceOptions(vram="1GB")
    with pytest.raises(PlacementError, match="it does not say how often each is used; give --calibration"):
        place(packed, options)
    other = make_model(tmp_path / "m", "mixtral", seed=1, num_hidden_layers=1)
    calibrate(other, Text("c", (TEXT[:4000],), "c"), tmp_path / "c", CalibrateOptions(context=32, samples=2))
    with pytest.raises(PlacementError, match="expected both of one model"):
        place(packed, options, tmp_path / "c")

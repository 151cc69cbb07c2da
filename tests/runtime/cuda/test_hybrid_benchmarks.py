"""The benchmarks of decoding within a budget from the first line to the last, on a GPU in plain torch: they say nothing
of speed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from native_build import skip_without_kernels

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import hybrid_decode, hybrid_matrices
from benchmarks.shared import budgets

skip_without_kernels()

LINKS = BandwidthProfile(resident=5e8, bus=1e7, worker=1e7, handover=1e-6, near=1e9, far_bus=1e8, far_worker=1e8)


@pytest.fixture
def _card(simulated_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are plain torch; what only asks torch of its GPU says nothing."""

    def engine(packed: PackedModel, options: EngineOptions | None = None, **changes: Any) -> Engine:
        return Engine(packed, options, **(changes | {"device": "cpu"} if "backend" in changes else changes))

    random_neurons, measured = hybrid_decode.random_neurons, list[BandwidthProfile]()
    here = {
        "Engine": engine,
        "random_neurons": lambda size, frequency, device, rows: random_neurons(size, frequency, rows=rows),
        "device_line": lambda: "a simulated card",
    }
    for name, value in here.items():
        monkeypatch.setattr(hybrid_decode, name, value)
    monkeypatch.setattr(budgets, "measure", lambda widths, device, threads: measured.append(LINKS))
    monkeypatch.setattr(budgets, "load_profile", lambda threads, hidden, device: measured[0] if measured else None)
    made = hybrid_matrices.random_model
    there = {
        "Engine": engine,
        "device_line": lambda: "a simulated card",
        "random_model": lambda size, layers, device, block="Q4_K": made(size, layers, "cpu", block),
    }
    for name, value in there.items():
        monkeypatch.setattr(hybrid_matrices, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("_card")
def test_the_benchmark_runs_and_writes_its_figures(tmp_path: Path) -> None:
    asked = ["--shape", "tiny", "--layers", "2", "--vram", "6.5MB,8.5MB", "--tokens", "3", "--rounds", "1"]
    asked += ["--threads", "2", "--json", str(tmp_path / "figures.json")]
    done = CliRunner().invoke(hybrid_decode.main, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "links, both sides at work: slots" in done.output
    assert "the peer was not run" in done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    for budget in ("6.5MB", "8.5MB"):
        assert f"tiny in {budget}" in done.output
        found = figures[budget]["ours"]
        assert list(found) == ["static", "slow"]
        for of in found.values():
            assert len(of["seconds"]) == 1
            assert of["needed"] > 0
            assert of["model"]["slowest"] in of["model"]
            assert "links measured" in of["description"]
    assert found["slow"]["slots"] > figures["6.5MB"]["ours"]["slow"]["slots"]


@pytest.mark.slow
@pytest.mark.usefixtures("_card")
def test_it_runs_by_copies_of_gates(tmp_path: Path) -> None:
    asked = ["--shape", "tiny", "--layers", "2", "--vram", "7.2MB", "--gate-copy", "none,2", "--policy", "static"]
    asked += ["--tokens", "3", "--rounds", "1", "--threads", "2", "--json", str(tmp_path / "figures.json")]
    done = CliRunner().invoke(hybrid_decode.main, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "copies of the gates of 2 blocks, which list 2 times as many" in done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["check"]["copies of gates"] < 0.02
    found = figures["7.2MB"]["ours"]
    assert list(found) == ["static", "static, copies 2"]
    assert found["static, copies 2"]["needed"] > 1.5 * found["static"]["needed"]


@pytest.mark.slow
@pytest.mark.usefixtures("_card")
@pytest.mark.parametrize(("sites", "planes"), [("mlp_mid", False), ("all", False), ("all", True)])
def test_a_model_of_sites_is_divided_by_matrices(sites: str, planes: bool, tmp_path: Path) -> None:
    # More layers than the two blocks that thresholds are found with.
    asked = ["--shape", "tiny", "--layers", "3", "--vram", "6.5MB,9MB", "--tokens", "3", "--rounds", "1"]
    asked += ["--sites", sites, "--threads", "2", "--json", str(tmp_path / "figures.json")]
    asked += ["--planes", "3.4"] if planes else []
    done = CliRunner().invoke(hybrid_matrices.main, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    for budget in ("6.5MB", "9MB"):
        assert f"tiny in {budget}" in done.output
        found = figures[budget]["ours"]
        assert list(found) == ["sparse", "dense", *(["planes"] if planes else [])]
        if planes:
            assert found["planes"]["unit"] == "bytes"
            assert found["planes"]["bytes"]["bus"] > 0
            assert "planes: 3." in done.output
        assert 0.3 < found["sparse"]["skipped"] < 0.7
        assert not found["dense"]["skipped"]
        assert found["sparse"]["needed"] < 0.7 * found["dense"]["needed"]
        assert found["sparse"]["model"]["slowest"] in found["sparse"]["model"]
        assert "links measured" in found["sparse"]["description"]

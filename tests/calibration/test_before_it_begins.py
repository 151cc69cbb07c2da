"""What `calibrate` says before it takes long: which formats hold the model; and how many windows it takes by itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models_for_tests import TEXT, make_model, make_opt

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate, samples_of
from sparsepack.files.text import Text
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.provenance import PRUNING_FILE


def said(model: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The note on formats."""
    capsys.readouterr()
    calibrate(model, Text("t", (TEXT[:4000],), ""), output, CalibrateOptions(context=32, samples=1))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "hold" in line)
    return line


def test_calibrate_says_which_formats_can_hold_the_model_or_that_none_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = said(make_model(tmp_path / "llama"), tmp_path / "a", capsys)
    assert llama.startswith("note: formats that can hold ")
    assert "zigzag-q4_k" in llama
    assert "cannot" not in llama
    strange = said(make_model(tmp_path / "strange", hidden_act="gelu_new"), tmp_path / "b", capsys)
    assert (
        ": slide-int8 once pruned, slide-fp8 once pruned, slide-bf16 once pruned, planes-q6_p; zigzag-q4_k cannot: "
        in strange
    )
    assert "activation 'gelu_new'; expected silu, relu" in strange
    (tmp_path / "llama" / PRUNING_FILE).write_text("{}")
    pruned = said(tmp_path / "llama", tmp_path / "d", capsys)
    assert pruned.endswith(f": {', '.join(name for name in FORMATS if name != 'neuron-q4_k')}")
    opt = said(make_opt(tmp_path / "opt"), tmp_path / "c", capsys)
    assert opt.startswith("note: no format can hold ")


def of_width(hidden: int, layers: int) -> Any:
    """Something with the matrices of a Llama."""
    shapes = {"attn_in": (3, 1), "attn_out": (1, 1), "mlp_in": (8, 1), "mlp_mid": (1, 4)}

    def stacked_shape(site: str, layer: int) -> tuple[int, int]:
        rows, columns = shapes[site]
        return rows * hidden, columns * hidden

    sites = [(layer, site) for layer in range(layers) for site in shapes]
    return SimpleNamespace(sites=sites, stacked_shape=stacked_shape)


def test_the_number_of_windows_falls_with_the_models_size_unless_it_is_given() -> None:
    small, middle, large = of_width(512, 8), of_width(1024, 14), of_width(4096, 32)
    assert samples_of(small, None, 2048, "cpu") == 128
    assert 8 < samples_of(middle, None, 2048, "cpu") < 128
    assert samples_of(large, None, 2048, "cpu") == 8
    assert samples_of(large, None, 2048, "cuda") == 128
    assert samples_of(large, 100, 2048, "cpu") == 100
    assert samples_of(large, 0, 2048, "cpu") == 0


def test_a_calibration_states_how_many_windows_were_drawn_by_default(tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m"))
    made = calibrate(model, Text("t", (TEXT[:4000],), ""), tmp_path / "c", CalibrateOptions(context=32))
    assert made.manifest["tokens"]["samples_asked"] == 128

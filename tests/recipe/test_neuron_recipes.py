"""Recipes whose artifact stores MLPs by neurons: the order is from the calibration."""

from pathlib import Path
from typing import Any

import pytest
from models_for_tests import TEXT, make_model
from recipes_for_tests import write_recipe

from sparsepack.artifacts.open import read_packed
from sparsepack.calibrate.folder import load
from sparsepack.errors import CalibrationError, PackingError, RecipeError
from sparsepack.pack import PackRequest, pack
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import load_recipe


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text(TEXT[:4000])
    return {
        "model": str(make_model(tmp_path / "relu", "llama", hidden_act="relu")),
        "calibrate": {"text": str(tmp_path / "text.txt"), "context": 64, "samples": 4},
        "activation_sparsity": None,
        "pack": {"format": "neuron-q4_k"},
        "eval": None,
        "generate": None,
        "gates": None,
    }


def test_it_takes_a_calibration_and_is_packed_by_it(tmp_path: Path, sections: dict[str, Any]) -> None:
    recipe, work = write_recipe(tmp_path, **sections), tmp_path / "work"
    planned = run_recipe(recipe, work=work, dry_run=True).report["artifact"]
    outcome = run_recipe(recipe, work=work)
    assert [stage["name"] for stage in outcome.report["stages"] if stage["status"] == "ran"] == [
        "calibrate",
        "pack",
        "verify",
    ]
    packed = read_packed(work / "model.gguf")
    assert packed.manifest["neurons"]["calibration"] == load(work / "calibration").sha256
    assert abs(planned["file_bytes"] - (work / "model.gguf").stat().st_size) < 4096
    # The same model by hand; another model's calibration is refused.
    pack(PackRequest(sections["model"], tmp_path / "m.gguf", "neuron-q4_k", calibration=work / "calibration"))
    assert read_packed(tmp_path / "m.gguf").manifest["neurons"] == packed.manifest["neurons"]
    other = make_model(tmp_path / "other", "llama", seed=1, hidden_act="relu")
    with pytest.raises(CalibrationError, match="calibrate this model"):
        pack(PackRequest(str(other), tmp_path / "n.gguf", "neuron-q4_k", calibration=work / "calibration"))


def test_mistakes_are_told_before_anything_runs(tmp_path: Path, sections: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="it stores neurons by how often they are active on calibration"):
        load_recipe(write_recipe(tmp_path, **sections), ["calibrate=null"])
    silu = make_model(tmp_path / "silu", "llama")
    with pytest.raises(RecipeError, match="activation 'silu': its neurons are never exactly inactive"):
        run_recipe(write_recipe(tmp_path, **{**sections, "model": str(silu)}), work=tmp_path / "w", dry_run=True)
    with pytest.raises(PackingError, match="give --calibration, a folder made by"):
        PackRequest("m", Path("o"), "neuron-q4_k").check()

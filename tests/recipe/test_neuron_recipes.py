"""Recipes whose artifact stores MLPs by neurons: the order is from the calibration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifacts_for_tests import tiny_by_neurons
from models_for_tests import TEXT, make_model
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.bench.options import BenchSettings
from sparsepack.calibrate.folder import load
from sparsepack.errors import CalibrationError, PackingError, RecipeError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.packing import PackRequest, pack
from sparsepack.recipe import run_recipe, stages
from sparsepack.recipe.load import FOLDER, load_recipe
from sparsepack.recipe.sections import Bench, Eval
from sparsepack.runtime.options import EngineOptions


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text(TEXT[:4000])
    return {
        "model": str(make_model(tmp_path / "relu", "llama", hidden_act="relu")),
        "calibrate": {"text": str(tmp_path / "text.txt"), "context": 64, "samples": 4},
        "activation_sparsity": None,
        "pack": {"format": "neuron-q4_k", "quantiser": "round"},
        "eval": None,
        "generate": None,
        "gates": None,
    }


def test_it_takes_a_calibration_and_is_packed_by_it(tmp_path: Path, sections: dict[str, Any]) -> None:
    recipe, work = write_recipe(tmp_path, **sections), tmp_path / "work"
    planned = run_recipe(recipe, work=work, dry_run=True).report["artifact"]
    outcome = run_recipe(recipe, work=work)
    assert ran(outcome) == ["calibrate", "pack", "verify"]
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
    said = refused(write_recipe(tmp_path, **sections), "calibrate=null")
    assert "it stores neurons by how often they are active on calibration" in said
    silu = make_model(tmp_path / "silu", "llama")
    with pytest.raises(RecipeError, match="activation 'silu': its neurons are never exactly inactive"):
        run_recipe(write_recipe(tmp_path, **{**sections, "model": str(silu)}), work=tmp_path / "w", dry_run=True)
    with pytest.raises(PackingError, match="give --calibration, a folder made by"):
        PackRequest("m", Path("o"), "neuron-q4_k").check()


PLACED = {
    "device": "cuda",
    "eval": {
        "perplexity": "shipped:heldout",
        "protocols": ["decode", "dense"],
        "context": 64,
        "windows": 2,
        "backend": "cuda",
        "cached": 0.3,
    },
    "generate": {"prompt": "The class", "tokens": 4, "cached": 0.3, "policy": "static"},
    "bench": {"prompt": 0, "generate": 4, "repetitions": 1, "cached": 0.3},
    "gates": {"realised_sparsity": {"min": 0.1}},
}


NO_NEURONS = "cached: the artifact's MLPs are not stored by neurons; expected pack.format neuron-q4_k"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("pack.format=zigzag-q4_k", f"eval.{NO_NEURONS}"),
        ("pack.format=zigzag-q4_k eval=null generate=null", f"bench.{NO_NEURONS}"),
        ("device=cpu eval.backend=cpu", "the cpu backend does not divide neurons so; expected device cuda"),
        ("generate.cached=null", "generate: policy static: it does nothing without cached"),
        (
            "eval.backend=transformers",
            "eval.cached: transformers gives neurons no slots; expected eval.backend cuda",
        ),
        ("eval.protocols=dense", "eval.cached: nothing is decoded that slots could serve; expected protocol decode"),
    ],
)
def test_slots_that_serve_nobody_are_told(tmp_path: Path, sections: dict[str, Any], changes: str, message: str) -> None:
    recipe = write_recipe(tmp_path, **{**sections, **PLACED, "gates": None})
    assert message in refused(recipe, *changes.split())


@pytest.mark.parametrize(
    ("key", "measured"),
    [({"cached": 0.3}, [(None, None), (0.3, None)]), ({"vram": "8GB"}, [(None, "8GB")]), ({}, [(None, None)])],
)
def test_a_card_too_small_for_the_model_need_not_hold_it(
    key: dict[str, Any],
    measured: list[tuple[float | None, str | None]],
    tmp_path: Path,
    sections: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benched = list[EngineOptions]()

    def bench_decode(packed: PackedModel, settings: BenchSettings, name: str, ids: list[int] | None) -> dict[str, Any]:
        benched.append(settings.engine)
        return {"of": len(benched)}

    monkeypatch.setattr("sparsepack.bench.decode.bench_decode", bench_decode)
    (tmp_path / "packed").mkdir()
    file = tiny_by_neurons(tmp_path / "packed")
    monkeypatch.setattr(stages, "artifact_of", lambda job: file)
    monkeypatch.setattr(stages, "bench_texts", lambda recipe: ())
    placed = {"eval": {**PLACED["eval"], "cached": None, **key}, "bench": {"generate": 4, **key}}
    recipe = load_recipe(write_recipe(tmp_path, **{**sections, "device": "cuda", **placed}))
    job: Any = SimpleNamespace(recipe=recipe, folder=tmp_path, model="m")
    stages.BENCH.run(job, Bench.find_in(recipe))
    assert [(engine.cached, engine.vram) for engine in benched] == measured
    assert json.loads((tmp_path / "bench.json").read_text())["with_places"] == ({"of": 2} if "cached" in key else None)
    dense = stages.eval_request(job, Eval.find_in(recipe), "dense").engine
    assert (dense.cached, dense.vram) == (None, key.get("vram"))


def test_a_gate_on_neurons_that_nobody_skips_is_told(tmp_path: Path, sections: dict[str, Any]) -> None:
    recipe = write_recipe(tmp_path, **{**sections, **PLACED, "eval": {**PLACED["eval"], "cached": None}})
    said = refused(recipe, "eval.backend=transformers")
    assert "gates.realised_sparsity: transformers computes inactive neurons, too" in said
    assert load_recipe(recipe, []).name == "tiny"


@pytest.mark.long
def test_the_shipped_recipe_runs(tmp_path: Path, sections: dict[str, Any]) -> None:
    small = ["calibrate.text=shipped:train", "calibrate.context=64", "calibrate.samples=4", "eval.context=64"]
    small += ["eval.perplexity=shipped:heldout", "eval.windows=2", "eval.backend=reference", "generate.tokens=4"]
    small += ["bench.backend=reference", "bench.prompt=8", "bench.generate=4", "gates.perplexity_ratio=null"]
    recipe = FOLDER / "relu-neurons.yaml"
    outcome = run_recipe(recipe, [f"model={sections['model']}", *small], tmp_path / "work")
    assert ran(outcome) == ["calibrate", "pack", "verify", "eval", "bench", "generate"]
    assert outcome.passed

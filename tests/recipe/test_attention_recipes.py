"""Recipes whose artifact reads few tokens: its channels are from the calibration of the model that is packed."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.calibrate.folder import load
from sparsepack.errors import RecipeError
from sparsepack.formats.open import read_packed
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import load_recipe
from sparsepack.recipe.sections import sparse_attention

DOUBLE = {"attention": "double", "channels": 8, "tokens": 0.25, "sinks": 1, "recent": 4, "min_context": 8}
SECTIONS: dict[str, Any] = {
    "pack": {**DOUBLE, "quantiser": "round", "dense_layers": [0, 2]},
    "activation_sparsity": None,
    "eval": None,
    "generate": None,
    "gates": None,
}


@pytest.mark.long
def test_it_takes_a_calibration_and_nothing_else(tmp_path: Path) -> None:
    recipe, work = write_recipe(tmp_path, **SECTIONS), tmp_path / "work"
    assert ran(run_recipe(recipe, work=work)) == ["calibrate", "pack", "verify"]
    packed = read_packed(work / "model.gguf")
    assert packed.attention is not None
    assert [channels is None for channels in packed.attention.channels] == [True, False, True]
    assert packed.manifest["attention"]["tokens"] == "1/4"
    assert packed.manifest["attention"]["calibration"] == load(work / "calibration").sha256
    assert packed.manifest["recipe"]["pack"]["dense_layers"] == "0,2"
    assert json.loads((work / "pack.json").read_text())["attention"]["dense_layers"] == [0, 2]
    assert ran(run_recipe(recipe, ["pack.tokens=1/8"], work)) == ["pack", "verify"]
    assert ran(run_recipe(recipe, ["calibrate.seed=1"], work)) == ["calibrate", "pack", "verify"]


@pytest.mark.long
def test_a_pruned_model_is_calibrated_again(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SECTIONS, prune={"keep": 6, "of": 8, "method": "magnitude"})
    work = tmp_path / "work"
    assert ran(run_recipe(recipe, work=work)) == ["calibrate", "prune", "calibrate_pruned", "pack", "verify"]
    section = read_packed(work / "model.gguf").manifest["attention"]
    assert section["calibration"] == load(work / "calibration_pruned").sha256


def test_it_is_evaluated_as_it_decodes(tmp_path: Path) -> None:
    sections = {**SECTIONS, "eval": {"perplexity": "shipped:heldout", "context": 64, "windows": 3}}
    outcome = run_recipe(write_recipe(tmp_path, **sections), work=tmp_path / "work")
    (row,) = outcome.report["evaluations"][0]["perplexity"]
    assert row["protocol"] == "decode"
    assert row["tokens_read"]["target"] == 0.25
    assert row["tokens_read"]["of_sparse_layers"] < 0.5
    assert row["perplexity_ratio"]["value"] != 1


MISTAKES = {
    ("calibrate=null",): "pack.attention: its channels are chosen on calibration text; add a calibrate section",
    ("pack.tokens=9/8",): "pack: tokens '9/8': expected a share above 0",
    ("pack.attention=none",): "pack: channels 8: it is for attention double, not none",
    ("pack.format=q4_k",): "pack: format q4_k: it has no place for sparse attention",
    ("pack.recent=0",): "pack.recent: 0; expected greater than or equal to 1",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistakes_are_told_before_anything_is_opened(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert MISTAKES[overrides] in refused(write_recipe(tmp_path, **SECTIONS), *overrides)


def test_a_small_share_may_be_written_as_yaml_writes_numbers(tmp_path: Path) -> None:
    for written in (1e-05, "1e-5", "1/100000"):
        recipe = load_recipe(write_recipe(tmp_path, **{**SECTIONS, "pack": {**SECTIONS["pack"], "tokens": written}}))
        assert sparse_attention(recipe).policy.tokens == Fraction(1, 100_000)  # type: ignore[union-attr]


def test_what_the_model_does_not_have_is_told_before_anything_runs(tmp_path: Path) -> None:
    for override, said in (("pack.channels=65", "pack: channels 65"), ("pack.dense_layers=3", "pack: dense layers 3")):
        with pytest.raises(RecipeError, match=said):
            run_recipe(write_recipe(tmp_path, **SECTIONS), [override], tmp_path / "work", dry_run=True)

"""Recipes whose weights are fitted to the inputs that they meet."""

from pathlib import Path
from typing import Any

import pytest
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.errors import RecipeError
from sparsepack.recipe import run_recipe

SECTIONS: dict[str, Any] = {
    "calibrate": {"text": "shipped:train", "context": 64, "samples": 16, "batch": 4},
    "pack": {"refit": True, "quantiser": "gptq"},
    "generate": None,
    "gates": None,
}


@pytest.mark.long
def test_weights_are_fitted_on_the_calibrations_text(tmp_path: Path) -> None:
    recipe, work = write_recipe(tmp_path, **SECTIONS), tmp_path / "work"
    outcome = run_recipe(recipe, work=work)
    made = outcome.report["pack"]["refit"]
    assert (made["refit"], made["quantiser"], made["windows"]) == (True, "gptq", 16)
    assert all(row["error"] < row["error_before"] for row in made["sites"])
    assert outcome.report["verify"]["passed"]
    assert ran(run_recipe(recipe, ["pack.damping=0.1"], work)) == ["pack", "verify", "eval"]


def test_too_short_a_text_is_refused_before_anything_runs(tmp_path: Path) -> None:
    few = {**SECTIONS, "calibrate": {**SECTIONS["calibrate"], "samples": 4}}
    with pytest.raises(RecipeError, match=r"pack: 4 calibration windows of 64 tokens: .* expected 16 windows"):
        run_recipe(write_recipe(tmp_path, **few), work=tmp_path / "work", dry_run=True)


MISTAKES = {
    (
        "calibrate=null",
        "activation_sparsity=null",
    ): "pack.refit: weights are fitted to their inputs on calibration text",
    ("activation_sparsity=null",): "pack: --refit fits weights to what skipping leaves of their inputs",
    ("pack.format=f16", "activation_sparsity=null"): "pack: format f16: its matrices cannot be fitted to their inputs",
    (
        "pack.refit=false",
        "pack.quantiser=round",
        "pack.damping=0.5",
    ): "pack: damping 0.5: it does nothing without refit",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistakes_are_one_line(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert MISTAKES[overrides] in refused(write_recipe(tmp_path, **SECTIONS), *overrides)

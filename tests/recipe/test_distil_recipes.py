"""Recipes that distil: the distilled model takes the model's place, is calibrated again, and is compared with it."""

import json
from pathlib import Path

import pytest
from models_for_tests import make_model
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.errors import RecipeError
from sparsepack.formats.inspect import describe
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.publish.page import report_page
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import load_recipe
from sparsepack.recipe.run import RecipeOutcome
from sparsepack.recipe.stage import Job
from sparsepack.recipe.stages.distil import DISTIL, Distil

FEW = {"rank": 2, "steps": 2, "batch": 1, "length": 32}
MADE = ("calibrate", "rotate", "calibrate_rotated", "distil", "calibrate_distilled")
STAGES = (*MADE, "thresholds", "pack", "verify", "eval", "generate")
WITHOUT = {"verify": False, "eval": None, "generate": None, "gates": None}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecipeOutcome]:
    """(folder, outcome) of a run that rotates, distils, skips and packs; not to be changed."""
    folder = tmp_path_factory.mktemp("distilled")
    recipe = write_recipe(folder, rotate={}, distil=FEW, gates=None)
    return folder, run_recipe(recipe, work=folder / "work")


def test_every_later_stage_takes_the_distilled_model(once: tuple[Path, RecipeOutcome]) -> None:
    folder, outcome = once
    work = folder / "work"
    assert ran(outcome) == list(STAGES)
    source, rotated, distilled = map(open_checkpoint, ("shipped:tiny", work / "rotated", work / "distilled"))
    for name, model in (("rotated", rotated), ("distilled", distilled)):
        calibrated = json.loads((work / f"calibration_{name}" / "calibration.json").read_text())
        assert calibrated["model"]["sha256"] == model.sha256
    provenance = describe(work / "model.gguf")["provenance"]
    assert provenance["model"]["name"] == "shipped:tiny, rotated, distilled"
    assert provenance["model"]["sha256"] == distilled.sha256
    assert provenance["rotation"]["model_sha256"] == source.sha256
    assert provenance["distillation"]["model_sha256"] == rotated.sha256
    assert provenance["recipe"]["distil"] | FEW == provenance["recipe"]["distil"]
    assert outcome.report["verify"]["checked"][-1] == "weights of shipped:tiny, rotated, distilled"
    for model in ("shipped:tiny", work / "rotated"):
        assert verify(work / "model.gguf", model).passed
    assert outcome.report["distil"]["after"]["skipped"] == pytest.approx(0.5, abs=0.05)


def test_people_are_told(once: tuple[Path, RecipeOutcome], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = once
    run_recipe(folder / "tiny.yaml", work=folder / "work")
    assert "distilled: over 128 tokens of the calibration the KL divergence went from" in capsys.readouterr().out
    assert "Distilled: weights trained for 50 % skipped." in report_page(folder / "work")


def test_the_dry_run_reckons_with_the_distilled_model(once: tuple[Path, RecipeOutcome]) -> None:
    folder, outcome = once
    plan = run_recipe(folder / "tiny.yaml", work=folder / "other", dry_run=True).report
    assert [stage["name"] for stage in plan["stages"]] == list(STAGES)
    assert plan["artifact"]["file_bytes"] == pytest.approx(outcome.report["pack"]["file_bytes"], rel=5e-3)
    assert plan["tokens"]["distil"] == 2 * 4 * 32 + 8 * 32 + 2 * 8 * (32 + 16)
    job, asked = _job(folder / "tiny.yaml")
    few, more = (DISTIL.memory(job, asked.model_copy(update={"rank": rank})) for rank in (2, None))
    matrices = 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert few is not None
    assert more is not None
    assert 0.9 * 16 * matrices < more - few < 16 * matrices
    assert few > 4 * plan["model"]["parameters"]


def _job(recipe: Path) -> tuple[Job, Distil]:
    loaded = load_recipe(recipe)
    asked = Distil.asked_in(loaded)
    assert asked is not None
    return Job(loaded, open_checkpoint("shipped:tiny"), recipe.parent), asked


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, ["calibrate", "distil", "pack"]),
        ({"prune": {"keep": 6, "of": 8, "method": "magnitude"}}, ["calibrate", "distil", "prune", "pack"]),
        (
            {"prune": {"keep": 6, "of": 8, "method": "wanda", "windows": 2}},
            ["calibrate", "distil", "calibrate_distilled", "prune", "pack"],
        ),
        (
            {"activation_sparsity": {"sparsity": 0.5, "windows": 2}},
            ["calibrate", "distil", "calibrate_distilled", "thresholds", "pack"],
        ),
    ],
)
def test_the_distilled_model_is_calibrated_where_somebody_wants_to_know_it(
    changes: dict[str, object], stages: list[str], tmp_path: Path
) -> None:
    sections = {"activation_sparsity": None, **WITHOUT, **changes}
    recipe = write_recipe(tmp_path, distil=FEW, **sections)
    plan = run_recipe(recipe, work=tmp_path / "work", dry_run=True).report
    assert [stage["name"] for stage in plan["stages"]] == stages


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, distil=FEW, gates=None)
    assert "distil: it trains on the text of a calibration; add a calibrate section" in refused(
        recipe, "calibrate=null", "activation_sparsity=null", "eval=null"
    )
    assert "distil.sparsity" in refused(recipe, "distil.sparsity=1")
    with pytest.raises(RecipeError, match="distil: calibrate: 4 windows, of which a step takes 5"):
        run_recipe(recipe, ["distil.batch=5"], work=tmp_path / "work")
    model = make_model(tmp_path / "m")
    (model / "sparsepack_prune.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"sparsepack_prune\.json: damaged"):
        run_recipe(recipe, [f"model={model}"], work=tmp_path / "work")

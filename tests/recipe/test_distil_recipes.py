"""Recipes that distil: the distilled model takes the model's place, is calibrated again, and is compared with it."""

import json
from pathlib import Path

import pytest
import torch
from models_for_tests import make_model
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.errors import RecipeError
from sparsepack.formats.inspect import describe
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.pattern import Pattern, check_pattern
from sparsepack.publish.page import report_page
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import load_recipe
from sparsepack.recipe.model_stages import DISTIL
from sparsepack.recipe.run import RecipeOutcome
from sparsepack.recipe.sections import Distil
from sparsepack.recipe.stage import Job

SHORT = {"steps": 2, "batch": 1, "length": 32}
FEW = {"rank": 2, **SHORT}
MAGNITUDE = {"keep": 6, "of": 8, "method": "magnitude"}
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
    few, more = (DISTIL.cost(job, asked.model_copy(update={"rank": rank})).memory for rank in (2, None))
    matrices = 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert few is not None
    assert more is not None
    assert 0.9 * 16 * matrices < more - few < 16 * matrices
    assert few > 4 * plan["model"]["parameters"]


def _job(recipe: Path) -> tuple[Job, Distil]:
    loaded = load_recipe(recipe)
    asked = Distil.find_in(loaded)
    assert asked is not None
    return Job(loaded, open_checkpoint("shipped:tiny"), recipe.parent), asked


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, ["calibrate", "distil", "pack"]),
        ({"prune": MAGNITUDE, "distil": SHORT}, ["calibrate", "prune", "distil", "pack"]),
        (
            {"prune": MAGNITUDE, "distil": SHORT | {"sparsity": 0.5}},
            ["calibrate", "prune", "calibrate_pruned", "distil", "pack"],
        ),
        (
            {"prune": MAGNITUDE, "distil": SHORT, "rotate": {}},
            ["calibrate", "rotate", "calibrate_rotated", "prune", "distil", "pack"],
        ),
        (
            {"prune": MAGNITUDE, "distil": SHORT, "activation_sparsity": {"sparsity": 0.5, "windows": 2}},
            ["calibrate", "prune", "distil", "calibrate_distilled", "thresholds", "pack"],
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
    recipe = write_recipe(tmp_path, **{"activation_sparsity": None, "distil": FEW, **WITHOUT, **changes})
    plan = run_recipe(recipe, work=tmp_path / "work", dry_run=True).report
    assert [stage["name"] for stage in plan["stages"]] == stages


@pytest.mark.long
def test_a_model_that_was_pruned_and_distilled_is_not_calibrated_twice(tmp_path: Path) -> None:
    """Training writes its type into the source's configuration, which the stages behind it do not depend on."""
    skipped = {"sparsity": 0.5, "allocation": "uniform"}
    changes = {"prune": MAGNITUDE, "distil": SHORT, "activation_sparsity": skipped, "pack": None}
    recipe, work = write_recipe(tmp_path, **{**WITHOUT, **changes}), tmp_path / "work"
    run_recipe(recipe, work=work)
    plan = run_recipe(recipe, work=work, dry_run=True).report
    assert {stage["status"] for stage in plan["stages"]} == {"up to date"}


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, distil=FEW, gates=None)
    assert "distil: it trains on the text of a calibration; add a calibrate section" in refused(
        recipe, "calibrate=null", "activation_sparsity=null", "eval=null"
    )
    assert "distil.sparsity" in refused(recipe, "distil.sparsity=1")
    for more, said in (
        ("distil.sparsity=0", "distil: sparsity 0: the model would learn to say what it says"),
        ("prune={keep: 6, of: 8}", "distil: rank 2: an update of a rank would make numbers of a pruned model's zeros"),
    ):
        with pytest.raises(RecipeError, match=said):
            run_recipe(recipe, [more], work=tmp_path / "work")
    with pytest.raises(RecipeError, match="distil: calibrate: 4 windows, of which a step takes 5"):
        run_recipe(recipe, ["distil.batch=5"], work=tmp_path / "work")
    model = make_model(tmp_path / "m")
    (model / "sparsepack_prune.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"sparsepack_prune\.json: damaged"):
        run_recipe(recipe, [f"model={model}"], work=tmp_path / "work")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecipeOutcome]:
    """(folder, outcome) of a run that rotates, prunes, distils and packs without the zeros; not to be changed."""
    folder = tmp_path_factory.mktemp("pruned")
    sections = {"rotate": {}, "prune": {"keep": 6, "of": 8, "permute": True, "windows": 2}, "distil": SHORT}
    sections |= {
        "pack": {"format": "slide-int8", "quantiser": "round"},
        "activation_sparsity": None,
        "generate": None,
        "gates": None,
    }
    evaluated = {"perplexity": "shipped:heldout", "protocols": ["dense"], "context": 64, "windows": 3}
    recipe = write_recipe(folder, **sections, eval=evaluated)
    return folder, run_recipe(recipe, work=folder / "work")


@pytest.mark.long
def test_what_pruning_left_is_distilled_and_packed_without_its_zeros(pruned: tuple[Path, RecipeOutcome]) -> None:
    folder, outcome = pruned
    work = folder / "work"
    made = ["calibrate", "rotate", "calibrate_rotated", "prune", "distil"]
    assert ran(outcome) == [*made, "pack", "verify", "eval", "eval_pruned"]
    rotated, before, distilled = (open_checkpoint(work / name) for name in ("rotated", "pruned", "distilled"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(distilled.tensor(name) == 0, before.tensor(name) == 0)
    check_pattern(distilled.tensor(name), Pattern(6, 8))
    provenance = describe(work / "model")["provenance"]
    assert provenance["model"]["name"] == "shipped:tiny, rotated, pruned, distilled"
    assert provenance["pruning"]["model_sha256"] == rotated.sha256
    assert provenance["distillation"]["model_sha256"] == before.sha256
    assert provenance["distillation"]["teacher"] == "shipped:tiny, rotated"
    assert outcome.report["verify"]["passed"]
    assert outcome.report["distil"]["after"]["skipped"] == 0


@pytest.mark.long
def test_of_a_pruned_model_people_are_told(
    pruned: tuple[Path, RecipeOutcome], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outcome = pruned
    again = run_recipe(folder / "tiny.yaml", work=folder / "work")
    assert ran(again) == []
    said = capsys.readouterr().out
    assert "distilled: over 128 tokens of the calibration the KL divergence went from" in said
    assert "what pruning costs" in said
    assert "Distilled: weights trained. Over 128 tokens" in report_page(folder / "work")
    plan = run_recipe(folder / "tiny.yaml", work=folder / "other", dry_run=True).report
    assert plan["artifact"]["file_bytes"] == pytest.approx(outcome.report["pack"]["file_bytes"], rel=5e-3)
    assert plan["tokens"]["distil"] == 2 * 4 * 32 + 3 * 8 * 32


@pytest.mark.long
def test_a_model_that_was_pruned_elsewhere_learns_from_what_its_record_names(tmp_path: Path) -> None:
    prune("shipped:tiny", tmp_path / "p", PruneOptions(6, 8, method="magnitude"))
    sections = {
        "activation_sparsity": None,
        **WITHOUT,
        "pack": {"format": "slide-int8", "quantiser": "round"},
        "model": str(tmp_path / "p"),
    }
    recipe = write_recipe(tmp_path, distil=SHORT, **sections)
    outcome = run_recipe(recipe, work=tmp_path / "work")
    assert ran(outcome) == ["calibrate", "distil", "pack"]
    assert outcome.report["distil"]["teacher"] == "shipped:tiny"
    record = tmp_path / "p" / "sparsepack_prune.json"
    record.write_text(record.read_text().replace('"shipped:tiny"', '"./gone"'))
    with pytest.raises(RecipeError, match=r"distil: .* pruned from, and \./gone is not there; give --teacher"):
        run_recipe(recipe, work=tmp_path / "again")

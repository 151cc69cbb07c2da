"""Recipes that rotate: the rotated model takes the model's place, is calibrated again, and is compared with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models_for_tests import make_model
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.calibrate.rotate import RotateOptions, predict
from sparsepack.errors import RecipeError
from sparsepack.formats.inspect import describe
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.publish.card import model_card
from sparsepack.publish.page import report_page
from sparsepack.recipe import run_recipe
from sparsepack.recipe.run import RecipeOutcome

STAGES = ("calibrate", "rotate", "calibrate_rotated", "thresholds", "pack", "verify", "eval", "generate")
GATES = {"file_bytes": {"max": 1600000}}
"""The output matrix is no longer the embedding."""
PRUNE = {"keep": 6, "of": 8, "windows": 2}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RecipeOutcome]:
    """(recipe, work folder, outcome) of a run that rotates, skips and packs; not to be changed."""
    folder = tmp_path_factory.mktemp("rotated")
    recipe = write_recipe(folder, rotate={}, gates=GATES)
    return recipe, folder / "work", run_recipe(recipe, work=folder / "work")


@pytest.fixture
def work(once: tuple[Path, Path, RecipeOutcome], tmp_path: Path) -> Path:
    """A copy of that work folder, times of change kept."""
    return Path(shutil.copytree(once[1], tmp_path / "work"))


def test_every_later_stage_takes_the_rotated_model(once: tuple[Path, Path, RecipeOutcome]) -> None:
    _, work, outcome = once
    assert ran(outcome) == list(STAGES)
    rotated, source = open_checkpoint(work / "rotated"), open_checkpoint("shipped:tiny")
    for folder, model in (("calibration", source), ("calibration_rotated", rotated)):
        assert json.loads((work / folder / "calibration.json").read_text())["model"]["sha256"] == model.sha256
    assert json.loads((work / "thresholds.json").read_text())["model_sha256"] == rotated.sha256
    provenance = describe(work / "model.gguf")["provenance"]
    assert (provenance["model"]["name"], provenance["model"]["sha256"]) == ("shipped:tiny, rotated", rotated.sha256)
    assert (provenance["rotation"]["model"], provenance["rotation"]["model_sha256"]) == ("shipped:tiny", source.sha256)
    assert {"basis": "pca", "seed": 0, "weights": "auto"}.items() <= provenance["recipe"]["rotate"].items()
    assert outcome.report["verify"]["checked"][-1] == "weights of shipped:tiny, rotated"
    assert outcome.report["verify"]["passed"]
    assert verify(work / "model.gguf", "shipped:tiny").passed
    assert outcome.report["rotate"]["error"] < 1e-5


def test_accuracy_is_against_the_model_as_it_was(
    once: tuple[Path, Path, RecipeOutcome], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, _, outcome = once
    rows = [evaluation["perplexity"][0] for evaluation in outcome.report["evaluations"]]
    assert all(0 < row["kl_divergence"]["value"] < 1 for row in rows)
    run_recipe(recipe, work=work)
    out = " ".join(capsys.readouterr().out.split())
    assert "rotated: into the basis pca; over 256 tokens the logits differ by" in out
    assert "Rotated into the basis pca" in report_page(work)
    card = model_card(work / "model.gguf", [work / "report.json"])
    assert "| rotated | into the basis pca of `shipped:tiny`: the same function |" in card
    assert "The source, in this table, is `shipped:tiny`." in card


def test_the_dry_run_reckons_with_the_rotated_model(
    once: tuple[Path, Path, RecipeOutcome], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With an output matrix of its own, in float32."""
    plan = run_recipe(once[0], work=tmp_path / "work", dry_run=True).report
    assert [stage["name"] for stage in plan["stages"]] == list(STAGES)
    stored = {tensor["name"]: tensor for tensor in plan["artifact"]["tensors"]}
    made = describe(once[1] / "model.gguf")
    assert "output.weight" in stored
    assert plan["artifact"]["file_bytes"] == pytest.approx(made["file_bytes"], rel=0.002)
    assert plan["tokens"]["rotate"] == 2 * 4 * 64
    assert plan["peak_memory_bytes"]["rotate"] > 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rotated: the output matrix was the embedding itself (tied)" in out
    assert not (tmp_path / "work").exists()


def test_what_the_model_allows_is_asked_of_the_rotated_one(tmp_path: Path) -> None:
    """Types of their own for embedding and output matrix, which are one in the source."""
    types = {"format": "zigzag-q4_k", "embedding_type": "q8_0", "output_type": "q6_k"}
    with pytest.raises(RecipeError, match=r"the output matrix is the embedding itself \(tied\)"):
        run_recipe(write_recipe(tmp_path, pack=types), work=tmp_path / "work", dry_run=True)
    plan = run_recipe(write_recipe(tmp_path, pack=types, rotate={}), work=tmp_path / "work", dry_run=True).report
    assert {"Q8_0", "Q6_K"} <= plan["artifact"]["types"].keys()


@pytest.mark.long
def test_segments_are_reckoned_with_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, rotate={"segments": 2}, gates=None, generate=None)
    plan = run_recipe(recipe, work=tmp_path / "work", dry_run=True).report
    (note,) = (note for note in plan["rotation"]["notes"] if note.startswith("1 change of basis"))
    outcome = run_recipe(recipe, work=tmp_path / "work")
    assert note in outcome.report["rotate"]["notes"]
    assert plan["artifact"]["file_bytes"] == pytest.approx(
        describe(tmp_path / "work/model.gguf")["file_bytes"], rel=0.002
    )
    (start,) = outcome.report["rotate"]["boundaries"]
    said = f"into the basis pca of each of 2 segments (from blocks 0 and {start} on)"
    assert said in " ".join(capsys.readouterr().out.split())
    assert f"Rotated {said} before anything else" in report_page(tmp_path / "work")
    assert outcome.report["verify"]["passed"]
    assert verify(tmp_path / "work" / "model.gguf", "shipped:tiny").passed


def test_a_dry_run_takes_segments_of_equal_length(tmp_path: Path) -> None:
    made, _ = predict(open_checkpoint(make_model(tmp_path / "m", num_hidden_layers=5)), RotateOptions(segments=2))
    assert made.bases == (2,)


_PLAIN = ("pack.format=q4_k", "activation_sparsity=null", "generate=null")


def test_segments_that_cannot_be_are_refused_by_the_dry_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rotate={"segments": 4}, gates=None)
    with pytest.raises(RecipeError, match=r"rotate: .*4 segments of 3 blocks; expected at most 3"):
        run_recipe(recipe, work=tmp_path / "work", dry_run=True)
    assert "rotate.segments 2: it is for rotate.basis pca or learnt" in refused(
        recipe, "rotate={basis: hadamard, segments: 2}"
    )
    with pytest.raises(RecipeError, match="for which q4_k has no place"):
        run_recipe(recipe, ["rotate.segments=2", *_PLAIN], tmp_path / "w", True)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gates=null", []),
        ("rotate={basis: hadamard}", list(STAGES[1:])),
        ("rotate=null", ["thresholds", "pack", "verify", "eval", "generate"]),
        ("eval.windows=2", ["eval"]),
    ],
)
def test_a_changed_setting_reruns_its_stage_and_all_that_take_its_model(
    once: tuple[Path, Path, RecipeOutcome], work: Path, override: str, expected: list[str]
) -> None:
    plan = run_recipe(once[0], [override], work, dry_run=True).report
    assert [stage["name"] for stage in plan["stages"] if stage["status"] == "would run"] == expected


@pytest.mark.long
def test_what_is_rotated_and_then_pruned_is_calibrated_for_both(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rotate={}, prune=PRUNE, gates=None, generate=None)
    outcome = run_recipe(recipe, work=tmp_path / "work")
    before, after = STAGES[:3], ("thresholds", "pack", "verify", "eval", "eval_pruned")
    assert ran(outcome) == [*before, "prune", "calibrate_pruned", *after]
    source, rotated, pruned = map(
        open_checkpoint, ("shipped:tiny", tmp_path / "work/rotated", tmp_path / "work/pruned")
    )
    provenance = describe(tmp_path / "work" / "model.gguf")["provenance"]
    assert (provenance["model"]["name"], provenance["model"]["sha256"]) == (
        "shipped:tiny, rotated, pruned",
        pruned.sha256,
    )
    assert provenance["rotation"]["model_sha256"] == source.sha256
    assert (provenance["pruning"]["model"], provenance["pruning"]["model_sha256"]) == (
        "shipped:tiny, rotated",
        rotated.sha256,
    )
    norm = rotated.tensor("model.norm.weight")
    assert torch.equal(norm, torch.ones_like(norm))
    sparse = (pruned.tensor("model.layers.0.mlp.up_proj.weight") == 0).float().mean()
    assert sparse == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"prune": {"keep": 6, "of": 8, "method": "magnitude"}}, ["calibrate", "rotate", "prune", "pack"]),
        ({}, ["calibrate", "rotate", "pack"]),
    ],
)
def test_the_rotated_model_is_calibrated_where_somebody_wants_to_know_it(
    changes: dict[str, object], stages: list[str], tmp_path: Path
) -> None:
    without = dict.fromkeys(("activation_sparsity", "eval", "generate", "gates"))
    recipe = write_recipe(tmp_path, rotate={"basis": "hadamard"}, verify=False, **without, **changes)
    plan = run_recipe(recipe, work=tmp_path / "work", dry_run=True).report
    assert [stage["name"] for stage in plan["stages"]] == stages


def test_what_does_not_go_together_is_one_line(once: tuple[Path, Path, RecipeOutcome], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rotate={}, gates=None)
    assert "add a calibrate section" in refused(recipe, "calibrate=null", "activation_sparsity=null")
    assert "rotate.seed 3: it is for rotate.basis hadamard or learnt, not pca" in refused(recipe, "rotate.seed=3")
    assert "rotate.basis" in refused(recipe, "rotate.basis=random")
    with pytest.raises(RecipeError, match=r"rotate: .*rotated already, into the basis pca of shipped:tiny"):
        run_recipe(
            write_recipe(tmp_path, rotate={}, gates=None, model=str(once[1] / "rotated")), work=tmp_path / "other"
        )

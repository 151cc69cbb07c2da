"""Recipes that prune: the pruned model takes the model's place, and is compared with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recipes_for_tests import ran, refused, write_recipe

from sparsepack.errors import RecipeError
from sparsepack.formats.inspect import describe
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.pattern import Pattern, check_pattern
from sparsepack.publish.card import model_card
from sparsepack.publish.page import report_page
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import FOLDER
from sparsepack.recipe.run import RecipeOutcome

PRUNE = {"keep": 6, "of": 8, "permute": True, "windows": 2}
BOTH = ("calibrate", "prune", "calibrate_pruned", "thresholds", "pack", "verify", "eval", "eval_pruned", "generate")
SLID = (
    "activation_sparsity=null",
    "generate=null",
    "gates=null",
    "pack.format=slide-int8",
    "eval.protocols=dense",
)
"""Overrides: packed without its zeros, nothing skipped."""
SMALL = (
    "model=shipped:tiny",
    "calibrate={text: shipped:train, context: 64, samples: 4}",
    "eval={perplexity: shipped:heldout, context: 64, windows: 3}",
)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RecipeOutcome]:
    """(recipe, work folder, outcome) of a run that prunes, skips and packs; not to be changed."""
    folder = tmp_path_factory.mktemp("pruned")
    recipe = write_recipe(folder, prune=PRUNE)
    return recipe, folder / "work", run_recipe(recipe, work=folder / "work")


@pytest.fixture
def work(once: tuple[Path, Path, RecipeOutcome], tmp_path: Path) -> Path:
    """A copy of that work folder, times of change kept."""
    return Path(shutil.copytree(once[1], tmp_path / "work"))


def test_every_later_stage_takes_the_pruned_model(once: tuple[Path, Path, RecipeOutcome]) -> None:
    _, work, outcome = once
    assert ran(outcome) == list(BOTH)
    pruned, source = open_checkpoint(work / "pruned"), open_checkpoint("shipped:tiny")
    check_pattern(pruned.tensor("model.layers.1.mlp.down_proj.weight"), Pattern(6, 8))
    for folder, model in (("calibration", source), ("calibration_pruned", pruned)):
        assert json.loads((work / folder / "calibration.json").read_text())["model"]["sha256"] == model.sha256
    assert json.loads((work / "thresholds.json").read_text())["model_sha256"] == pruned.sha256
    provenance = describe(work / "model.gguf")["provenance"]
    assert provenance["model"]["sha256"] == pruned.sha256
    assert provenance["model"]["name"] == "shipped:tiny, pruned"
    assert (provenance["pruning"]["model"], provenance["pruning"]["model_sha256"]) == ("shipped:tiny", source.sha256)
    assert provenance["recipe"]["prune"]["keep"] == 6
    assert outcome.report["verify"]["checked"][-1] == "weights of shipped:tiny, pruned"
    assert outcome.report["verify"]["passed"]


def test_accuracy_is_against_the_model_as_it_was_and_the_pruned_one_stands_beside(
    once: tuple[Path, Path, RecipeOutcome],
    finished_once: tuple[Path, Path, RecipeOutcome],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, work, outcome = once
    rows = [evaluation["perplexity"][0] for evaluation in outcome.report["evaluations"]]
    before = finished_once[2].report["evaluations"][0]["perplexity"][0]["source_perplexity"]
    alone = outcome.report["eval_pruned"]["perplexity"][0]
    assert {row["source_perplexity"] for row in (*rows, alone)} == {before}
    assert {row["scored"] for row in (*rows, alone)} == {"second half"}
    assert (alone["protocol"], outcome.report["eval_pruned"]["subject"]["kind"]) == ("dense", "checkpoint")
    run_recipe(recipe, work=Path(shutil.copytree(work, tmp_path / "work")))
    out = " ".join(capsys.readouterr().out.split())
    assert "pruned: keep 6 of 8 in 21 matrices, by sparsegpt, permuted" in out
    for row in rows:
        added = row["perplexity"]["value"] / alone["perplexity"]["value"]
        assert f"{alone['perplexity_ratio']['value']:.4f} ±" in out
        assert f"{added:.4f} {row['perplexity_ratio']['value']:.4f} ±" in out
    page = report_page(tmp_path / "work")
    assert "keep 6 of 8 in 21 matrices" in page
    assert f"{alone['perplexity']['value']:.3f}" in page
    card = model_card(work / "model.gguf", [work / "report.json"])
    assert "| pruned | by sparsegpt, neurons and value channels in another order, from `shipped:tiny`" in card
    assert "The source, in this table, is `shipped:tiny`." in card


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gates=null", []),
        pytest.param("prune.damping=0.02", list(BOTH[1:]), marks=pytest.mark.long),
        pytest.param("prune={keep: 6, of: 8, method: magnitude}", list(BOTH[1:]), marks=pytest.mark.long),
        pytest.param("calibrate.seed=1", list(BOTH), marks=pytest.mark.long),
        pytest.param("pack.output_type=f16", ["pack", "verify", "eval", "generate"], marks=pytest.mark.long),
        pytest.param(
            "activation_sparsity.sparsity=0.4",
            ["thresholds", "pack", "verify", "eval", "generate"],
            marks=pytest.mark.long,
        ),
        ("eval.windows=2", ["eval", "eval_pruned"]),
    ],
)
def test_a_changed_setting_reruns_its_stage_and_all_that_take_its_model(
    once: tuple[Path, Path, RecipeOutcome], work: Path, override: str, expected: list[str]
) -> None:
    plan = run_recipe(once[0], [override], work, dry_run=True).report
    assert [stage["name"] for stage in plan["stages"] if stage["status"] == "would run"] == expected
    assert ran(run_recipe(once[0], [override], work)) == expected


@pytest.mark.long
def test_what_changes_no_byte_of_the_pruned_model_reruns_what_takes_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, prune={"keep": 6, "of": 8, "method": "magnitude"}, calibrate=None)
    run_recipe(recipe, SLID, tmp_path / "work")
    weights = (tmp_path / "work" / "pruned" / "model.safetensors").read_bytes()
    assert ran(
        run_recipe(recipe, [*SLID, "prune.sites=[{site: blk.0.mlp_in, keep: 6, of: 8}]"], tmp_path / "work")
    ) == [
        "prune",
        "pack",
        "verify",
        "eval",
        "eval_pruned",
    ]
    assert (tmp_path / "work" / "pruned" / "model.safetensors").read_bytes() == weights


@pytest.mark.long
def test_a_work_folder_that_was_moved_is_up_to_date_and_another_run_leaves_the_same_bytes(
    once: tuple[Path, Path, RecipeOutcome], work: Path, tmp_path: Path
) -> None:
    assert ran(run_recipe(once[0], work=work)) == []
    run_recipe(once[0], work=tmp_path / "another")
    for path in once[1].rglob("*"):
        if path.is_file() and path.name not in ("state.json", "report.json"):
            assert path.read_bytes() == (tmp_path / "another" / path.relative_to(once[1])).read_bytes(), path


def test_a_pruned_model_that_was_changed_is_made_again(once: tuple[Path, Path, RecipeOutcome], work: Path) -> None:
    with (work / "pruned" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert ran(run_recipe(once[0], work=work)) == ["prune"]  # the same bytes as before: the rest is as it was


@pytest.mark.long
def test_a_run_that_was_interrupted_while_pruning_goes_on_at_that_block(
    once: tuple[Path, Path, RecipeOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsepack.calibrate.pruning import prune_block as block

    layers = []

    def interrupted(*given: Any) -> Any:
        layers.append(given[1])
        if len(layers) == 2:
            raise KeyboardInterrupt
        return block(*given)

    monkeypatch.setattr("sparsepack.calibrate.pruning.prune_block", interrupted)
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        run_recipe(once[0], work=tmp_path / "work")
    assert ran(run_recipe(once[0], work=tmp_path / "work")) == list(BOTH[1:])
    assert layers == [0, 1, 1, 2]
    weights = "pruned/model.safetensors"
    assert (tmp_path / "work" / weights).read_bytes() == (once[1] / weights).read_bytes()


@pytest.mark.long
def test_a_slid_folder_comes_of_a_pruned_model_and_the_dry_run_says_how_large(tmp_path: Path, capsys: Any) -> None:
    sites = [{"site": "blk.0.*", "keep": 14, "of": 16}, {"site": "blk.1.mlp_mid", "keep": 8, "of": 8}]
    recipe = write_recipe(tmp_path, prune={**PRUNE, "sites": sites})
    plan = run_recipe(recipe, SLID, tmp_path / "work", dry_run=True).report
    assert not (tmp_path / "work").exists()
    keeps = {row["site"]: row["keeps"] for row in plan["sites"]}
    assert (keeps["blk.0.mlp_in"], keeps["blk.1.mlp_in"], keeps["blk.1.mlp_mid"]) == ("14 of 16", "6 of 8", None)
    out = capsys.readouterr().out
    assert "14 of 16, 6 of 8" in out
    assert "14 of 16, all, 6 of 8" in out
    assert plan["tokens"]["calibrate"] == 4 * 64
    assert plan["tokens"]["prune"] == 2 * 2 * 64
    assert plan["tokens"]["eval"] == plan["tokens"]["eval_pruned"] == 2 * 3 * 64
    assert plan["peak_memory_bytes"]["prune"] > plan["process_bytes"]
    made = run_recipe(recipe, SLID, tmp_path / "work")
    assert ran(made) == ["calibrate", "prune", "pack", "verify", "eval", "eval_pruned"]
    assert made.report["verify"]["passed"]
    assert plan["artifact"]["file_bytes"] == pytest.approx(made.report["pack"]["file_bytes"], rel=1e-3)
    assert plan["artifact"]["types"] == {
        kind: {name: row[name] for name in ("tensors", "bytes")} for kind, row in made.report["pack"]["types"].items()
    }


@pytest.mark.long
def test_a_recipe_may_prune_and_nothing_else(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, prune={"keep": 6, "of": 8, "permute": True, "method": "magnitude"}, calibrate=None, pack=None
    )
    overrides = [*SLID[:3], "verify=false", "eval.protocols=[]"]
    plan = run_recipe(recipe, overrides, tmp_path / "work", dry_run=True).report
    assert plan["tokens"] == {"prune": 0, "eval": 2 * 3 * 64}
    outcome = run_recipe(recipe, [*overrides, "gates={perplexity_ratio: {min: 1.0001}}"], tmp_path / "work")
    assert ran(outcome) == ["prune", "eval"]
    assert outcome.passed, "the model that is compared is the one from before"
    assert outcome.report["evaluations"][0]["subject"]["name"] == "shipped:tiny, pruned"


def test_the_loss_from_pruning_has_a_gate(once: tuple[Path, Path, RecipeOutcome], work: Path) -> None:
    outcome = run_recipe(once[0], ["gates={pruning_perplexity_ratio: {max: 0.5, min: 0.5}}"], work)
    least, most = outcome.report["gates"][-2:]
    alone = outcome.report["eval_pruned"]["perplexity"][0]["perplexity_ratio"]["value"]
    assert least["measured"] == most["measured"] == alone
    assert (least["gate"], least["where"]) == ("pruning_perplexity_ratio", "shipped:heldout, pruned")
    assert (least["passed"], most["passed"], outcome.passed) == (True, False, False)


MISTAKES = {
    ("prune.keep=8",): "prune: keep 8 of 8: expected 1 <= keep < of",
    ("prune.of=32",): "prune.of: 32; expected less than or equal to 16",
    ("prune.method=random",): "prune.method: \"random\"; expected 'magnitude', 'wanda' or 'sparsegpt'",
    ("prune.sites=[{site: blk.0.*, keep: 9, of: 8}]",): "prune: blk.0.*: keep 9 of 8: expected",
    ("prune.sites=[{site: blk.0.*, kep: 6, of: 8}]",): "prune.sites.0.kep: unknown key; nearest: prune.sites.0.keep",
    ("prune.sites={site: blk.0.*, keep: 6, of: 8}",): "prune.sites: ",
    ("prune={keep: 6}",): "prune.of: missing",
    ("calibrate=null", "activation_sparsity=null"): "prune.method: sparsegpt looks at what enters a matrix",
    ("activation_sparsity=null", "pack={format: slide-int8, keep: 6, of: 8}"): "pack.keep: it is for a model that was",
    ("activation_sparsity=null", "pack={format: slide-int8, output_type: q6_k}"): "pack: format slide-int8: embedding",
    ("gates={pruning_perplexity_ratio: {max: 1}}", "prune=null"): "nothing is pruned; add a prune section",
    ("gates={pruning_perplexity_ratio: {max: 1}}", "eval=null"): "add texts as eval.perplexity",
    (
        "gates={pruning_perplexity_ratio: {max: 1}}",
        "activation_sparsity=null",
        "pack=null",
        "verify=false",
        "generate=null",
        "eval.protocols=dense",
    ): "gates.pruning_perplexity_ratio: nothing is done to the pruned model; perplexity_ratio is this",
}


@pytest.mark.parametrize(("overrides", "expected"), MISTAKES.items(), ids=lambda each: str(each)[:60])
def test_a_mistake_is_told_before_anything_is_opened(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    assert expected in refused(write_recipe(tmp_path, prune=PRUNE), *overrides)


MISFITS = {
    (
        "prune=null",
    ): "pack: shipped:tiny: nothing says which of its weights were pruned; prune it (in a recipe, add a prune ",
    ("prune.keep=7",): "pack: keep 7 of 8: 3 windows of 4 with 2 nonzeros each have no room",
    ("prune={keep: 3, of: 5}",): "pack: keep 3 of 5: windows of 4 do not cover it",
    ("prune.ignore=blk.7.*",): "prune: ignore 'blk.7.*' matches no site; nearest",
    ("prune.sites=[{site: blk.*, keep: 8, of: 8}]",): "prune.sites: they leave nothing to prune",
}


@pytest.mark.parametrize(("overrides", "expected"), MISFITS.items(), ids=lambda each: str(each)[:60])
@pytest.mark.parametrize("dry_run", [True, False])
def test_what_the_model_or_the_format_does_not_allow_is_told_before_any_stage(
    tmp_path: Path, overrides: tuple[str, ...], expected: str, dry_run: bool
) -> None:
    with pytest.raises(RecipeError) as caught:
        run_recipe(write_recipe(tmp_path, prune=PRUNE), [*SLID, *overrides], tmp_path / "work", dry_run=dry_run)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_a_model_that_was_pruned_before_needs_no_prune_section(once: Any, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, calibrate=None, model=str(once[1] / "pruned"))
    outcome = run_recipe(recipe, SLID, tmp_path / "work")
    assert ran(outcome) == ["pack", "verify", "eval"]
    assert outcome.report["pack"]["pruning"]["patterns"] == {"keep 6 of 8": 21}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("slide-6of8-int8", ["calibrate", "prune", "calibrate_pruned", "pack", "verify", "eval", "eval_pruned"]),
        ("prune-6of8-zigzag50", list(BOTH[:-1])),
    ],
)
def test_the_shipped_recipes_that_prune_run(name: str, stages: list[str], tmp_path: Path) -> None:
    recipe = FOLDER / f"{name}.yaml"
    plan = run_recipe(recipe, SMALL, tmp_path / "work", dry_run=True).report
    assert {row["keeps"] for row in plan["sites"]} == {"6 of 8"}
    outcome = run_recipe(recipe, SMALL, tmp_path / "work")
    assert ran(outcome) == stages
    assert outcome.passed

"""Recipe files and overrides: what is accepted, and that every mistake is one line saying what, where, expected."""

import re
from pathlib import Path

import pytest
import yaml
from recipes_for_tests import TINY, refused, write_recipe

from sparsepack.errors import RecipeError, SiteError, UserError
from sparsepack.recipe import run_recipe
from sparsepack.recipe.load import FOLDER, load_recipe, shipped_recipes

RECIPES = list(shipped_recipes().values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_validates_and_describes_itself(path):
    given = yaml.safe_load(path.read_text())
    recipe = load_recipe(path, [] if "model" in given else ["model=somewhere"])
    assert recipe.name == path.stem
    assert recipe.description
    assert "\n" not in recipe.description


def test_recipes_for_any_model_ask_for_one():
    with pytest.raises(RecipeError, match=r"model: missing; add it to the recipe, or give --set model=\.\.\."):
        load_recipe(FOLDER / "teal50.yaml")


MISTAKES = {
    "activation_sparsity.sparsty=0.4": (
        r"activation_sparsity\.sparsty: unknown key; nearest: activation_sparsity\.sparsity \(known: sparsity, "
    ),
    "calibrat.samples=1": r"calibrat: unknown key; nearest: calibrate ",
    "gates.kl_divergence.maximum=1": r"gates\.kl_divergence\.maximum: unknown key; nearest: gates\.kl_divergence\.max",
    "gates.tasks.a.acc.mn=1": r"gates\.tasks\.a\.acc\.mn: unknown key; nearest: gates\.tasks\.a\.acc\.min ",
    "activation_sparsity.sparsity=1.5": r"activation_sparsity\.sparsity: 1\.5; expected less than 1 \[from --set",
    "activation_sparsity.sparsity=half": r'activation_sparsity\.sparsity: "half"; expected a number',
    "activation_sparsity.sparsity=.nan": r"activation_sparsity\.sparsity: NaN; expected ",
    "activation_sparsity.allocation=tael": r"\.allocation: \"tael\"; expected 'fisher', 'uniform', 'teal' or 'global'",
    "calibrate.samples=2.5": r"calibrate\.samples: 2\.5; expected a whole number",
    "eval.backend=gpu": r"eval\.backend: \"gpu\"; expected 'transformers', 'reference', 'cpu', 'cuda' or 'metal'",
    "eval.runtime=cpu": r"eval\.runtime: unknown key; nearest: eval\.",
    "calibrate.samples=true": r"calibrate\.samples: true; expected a whole number",
    "calibrate.text=[]": r"calibrate\.text: \[\]; expected at least one name",
    "calibrate=4": r"calibrate: 4; expected a mapping",
    "calibrate.samples.x=4": r"--set calibrate\.samples\.x=4: calibrate\.samples is 4, it has no keys inside",
    "verify=2": r"verify: 2; expected true or false",
    "schema=2": r"schema: 2; expected 1",
    "name=../up": r'name: "\.\./up"; ',
    "gates.kl_divergence={}": r"gates\.kl_divergence: \{\}; expected min, max or both",
    "gates.file_bytes={min: 2, max: 1}": r"gates\.file_bytes: .*; min 2 is above max 1: nothing could pass",
    "generate.prompt=3": r"generate\.prompt: 3; expected text",
    "activation": r"--set activation: expected PATH=VALUE",
    ".a=3": r"--set \.a=3: expected PATH=VALUE",
    "verify=[1": r"--set verify=\[1, line 1: not YAML",
}


@pytest.mark.parametrize(("override", "expected"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_place_and_remedy(recipe_file, override, expected):
    assert re.search(expected, refused(recipe_file, override))


CONTRADICTIONS = {
    "calibrate=null": "activation_sparsity: thresholds are taken on calibration text; add a calibrate section",
    "pack=null": "verify: there is no artifact to verify; add a pack section",
    "pack.format=q4_k": "pack: format q4_k: it has no place for thresholds; leave sparsity out or use zigzag-q4_k",
    "eval.perplexity=[]": "eval: nothing to evaluate",
    "eval=null": "gates.perplexity_ratio: it is not measured; add texts as eval.perplexity",
    "eval.protocols=dense": "gates.realised_sparsity: nothing runs sparse",
    "gates.tasks.sp_blimp.acc.min=0.6": "gates.tasks.sp_blimp: it is not measured; add it to eval.tasks",
    "activation_sparsity.offsets=true": "activation_sparsity.offsets: it is for activation_sparsity.allocation global",
    "calibrate.sinks=64": "calibrate.sinks: 64; expected fewer than context, 64",
    "eval.task_path=/nowhere": "eval.task_path: /nowhere is no folder",
    "eval.backend=cuda": "eval.backend: device cpu: the cuda backend runs on NVIDIA GPUs",
    "bench={backend: cuda}": "bench: device cpu: the cuda backend runs on NVIDIA GPUs",
    "bench={prompt: 0, generate: 0}": "bench: nothing to measure",
    "eval.backend=cpu; pack=null; verify=false; generate=null": (
        "eval.backend: it runs an artifact; expected a pack section of format zigzag"
    ),
    "verify=false; gates.verify=true": "gates.verify: the artifact is not verified; expected verify: true",
}


@pytest.mark.parametrize(("override", "expected"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_sections_that_do_not_go_together_are_told_before_anything_runs(recipe_file, override, expected):
    assert expected in refused(recipe_file, *override.split("; "))


def test_the_ci_recipe_gates_the_kernels_that_users_run():
    recipe = load_recipe(FOLDER / "ci.yaml")
    assert recipe.eval.runtime == "cpu"
    assert recipe.gates.perplexity_ratio.max < 1.2


def test_overrides_are_yaml_and_the_last_one_wins(recipe_file):
    overrides = [
        "eval.perplexity=[a.txt, b.txt]",
        "activation_sparsity.sparsity=0.3",
        "activation_sparsity.sparsity=0.4",
        "bench=null",
    ]
    recipe = load_recipe(recipe_file, [*overrides, "gates.tasks=null", "gates.tasks={}", "model=shipped:tiny"])
    assert recipe.eval.perplexity == ("a.txt", "b.txt")
    assert recipe.activation_sparsity.sparsity == 0.4
    assert recipe.bench is None


def test_an_override_leaves_what_an_alias_stands_for_as_it_is(tmp_path):
    recipe = write_recipe(tmp_path, gates=None)
    gates = "gates: {perplexity: &limit {max: 9}, perplexity_ratio: *limit}"
    recipe.write_text(recipe.read_text().replace("gates: null", gates))
    gates = load_recipe(recipe, ["gates.perplexity.max=20"]).gates
    assert (gates.perplexity.max, gates.perplexity_ratio.max) == (20, 9)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "empty; expected at least schema, name and model"),
        ("- 1\n- 2", r"\[1, 2\]; expected keys and values"),
        ("a: [1\nb: 2", "line 2: not YAML"),
        ("schema: 1\nname: a\nname: b\nmodel: m", "line 3: the key 'name' stands twice"),
        ("name: a\nmodel: m", "schema: missing"),
        ("schema: 1\nname: a\nmodel: m\n7: x", "line 4: the key 7 is a number"),
        ("name: 2024-01-01\nschema: 1\nmodel: !!python/object:a {}", "not YAML"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, content, expected):
    path = tmp_path / "r.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.match(f"{re.escape(str(path))}.*{expected}", refused(path))


def test_a_missing_file_names_the_nearest_ones(recipe_file):
    with pytest.raises(RecipeError, match=r"tny\.yaml: no such recipe; nearest: .*tiny\.yaml"):
        load_recipe(recipe_file.with_name("tny.yaml"))
    with pytest.raises(RecipeError, match=r"quikstart: no such recipe; nearest: quickstart$"):
        load_recipe(Path("quikstart"))


@pytest.mark.parametrize(
    ("override", "error", "expected"),
    [
        (
            "calibrate.context=2048",
            RecipeError,
            "calibrate.context: 2048 tokens; shipped:tiny was made for at most 1024",
        ),
        ("generate.tokens=1024", RecipeError, "made for at most 1024"),
        ("activation_sparsity.ignore=blk.9.*", SiteError, "matches no site; nearest"),
        ("eval.perplexity=nowhere.txt", UserError, "nowhere.txt: no such file"),
        ("device=cuda:99", RecipeError, "device: cuda:99; torch finds none"),
    ],
)
def test_what_the_model_does_not_allow_is_told_before_any_stage(tmp_path, recipe_file, override, error, expected):
    with pytest.raises(error) as caught:
        run_recipe(recipe_file, [override], work=tmp_path / "work")
    assert expected in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_the_recipe_survives_a_round_trip_through_its_own_report(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(recipe.to_json()))
    assert load_recipe(again) == recipe
    assert set(TINY) <= set(recipe.to_json())

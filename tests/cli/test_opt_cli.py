"""What cannot be done with OPT is refused in one line, before any work."""

from pathlib import Path

import pytest
from commands_for_tests import fails, succeeds
from models_for_tests import TEXT, make_opt

from sparsepack.formats.table import FORMATS

REASON = "no format holds and no engine runs opt models (learned positions, norms that subtract the mean, and an MLP"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a calibration beside it."""
    folder = make_opt(tmp_path_factory.mktemp("opt") / "m")
    text = folder.parent / "text.txt"
    text.write_text(TEXT[:6000])
    succeeds("calibrate", folder, "--text", text, "--context", 48, "-o", folder.parent / "c")
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_no_format_holds_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    from sparsepack.calibrate import folder

    options = ["--calibration", model.parent / "c"]
    options += [] if format == "neuron-q4_k" else ["--sparsity", 0.5]
    options = options if FORMATS[format].thresholds else []
    monkeypatch.setattr(folder, "load", lambda _: pytest.fail("work was begun"))
    assert f"{model}: {REASON}" in fails("pack", model, "--format", format, *options, "-o", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_nor_with_sparse_attention(model: Path, tmp_path: Path) -> None:
    options = ("--calibration", model.parent / "c", "--attention", "double")
    assert REASON in fails("pack", model, *options, "-o", tmp_path / "a")


@pytest.mark.parametrize("dry", [True, False])
def test_a_recipe_that_packs_it_says_so_at_once_and_one_that_does_not_runs(model: Path, tmp_path: Path, dry: bool):
    recipe = tmp_path / "r.yaml"
    text = model.parent / "text.txt"
    recipe.write_text(
        f"schema: 1\nname: opt\nmodel: {model}\ncalibrate: {{text: [{text}], context: 48, samples: 4}}\n"
        "prune: {keep: 6, of: 8}\nactivation_sparsity: {sparsity: 0.5}\n"
        f"eval: {{perplexity: [{text}], context: 48, windows: 2, protocols: [all]}}\n"
    )
    options = ["--work", tmp_path / "w", *(["--dry-run"] if dry else [])]
    succeeds("run", recipe, *options)
    recipe.write_text(recipe.read_text().replace("prune: {keep: 6, of: 8}", "pack: {format: zigzag-q4_k}"))
    assert f"pack: {model}: {REASON}" in fails("run", recipe, "--overwrite", *options)

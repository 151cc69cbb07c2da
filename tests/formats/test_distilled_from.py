"""`verify --against` and `eval --against` the model from before it was distilled, rotated or not; and what is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from models_for_tests import TEXT, make_model

from sparsepack import DistilOptions, EvalRequest, PackRequest, evaluate, pack, prune, rotate, verify
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.distillation import distil
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.cli.commands.inspect import artifact_table, checkpoint_table
from sparsepack.files.text import Text
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.inspect import describe
from sparsepack.inspection import inspect
from sparsepack.publish.card import model_card


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in `m`, that rotated in `r`, and that distilled, rotated first in `rd` and alone in `d`."""
    folder = tmp_path_factory.mktemp("made")
    text = Text("topics", (TEXT[:2000],), "topics")
    few = DistilOptions(steps=2, batch=1, length=16, rate=2e-4)
    options = CalibrateOptions(context=32, samples=4)
    calibrate(make_model(folder / "m", "qwen3", hidden_act="relu"), text, folder / "c", options)
    rotate(folder / "m", folder / "c", folder / "r")
    calibrate(folder / "r", text, folder / "cr", options)
    distil(folder / "r", folder / "cr", folder / "rd", few)
    distil(folder / "m", folder / "c", folder / "d", few)
    return folder


def packed(made: Path, name: str, path: Path, kind: str = "zigzag-q4_k", **asked: Any) -> Path:
    pack(PackRequest(str(made / name), path, format=kind, **asked))
    return path


@pytest.mark.parametrize("kind", ["zigzag-q4_k", "neuron-q4_k"])
def test_the_model_from_before_is_off_by_what_was_trained(kind: str, made: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"calibration": made / "c"} if kind == "neuron-q4_k" else {}
    if asked:
        calibrate(made / "d", Text("t", (TEXT[:2000],), "t"), tmp_path / "cd", CalibrateOptions(context=32, samples=2))
        asked = {"calibration": tmp_path / "cd", "fitting": RefitOptions(quantiser="round")}
    path = packed(made, "d", tmp_path / "m.gguf", kind, **asked)
    own, before = verify(path, made / "d"), verify(path, made / "m")
    assert own.passed, own.problems
    assert own.checked[-1] == f"weights of {made / 'd'}"
    assert before.passed, before.problems
    assert "trained since (distilled): each matrix may be off by as much as the manifest says, " in before.checked[-1]
    largest = max(json.loads((made / "d" / "sparsepack_distil.json").read_text())["changes"].values())
    widened = {tensor.name: tensor.bound - BLOCKS[tensor.type].error for tensor in before.tensors}
    trained = {name for name, more in widened.items() if more > 0}
    assert trained
    assert all(name.startswith("blk.") and "norm" not in name for name in trained)
    assert max(widened.values()) == pytest.approx(largest, rel=1e-6)
    assert all(tensor.bound == BLOCKS[tensor.type].error for tensor in own.tensors)


def test_a_rotated_and_distilled_model_is_that_of_each_step(made: Path, tmp_path: Path) -> None:
    path = packed(made, "rd", tmp_path / "m.gguf")
    for name in ("rd", "r", "m"):
        report = verify(path, made / name)
        assert report.passed, report.problems
        assert ("trained since" in report.checked[-1]) == (name != "rd")
        assert ("in the artifact's basis" in report.checked[-1]) == (name == "m")


def test_another_model_and_a_pruned_one_are_told(made: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", "qwen3", hidden_act="relu", num_hidden_layers=3)
    path = packed(made, "d", tmp_path / "m.gguf")
    assert "another model, or another version of it" in verify(path, tmp_path / "other").problems[0]
    prune(made / "d", tmp_path / "p", PruneOptions(6, 8, method="magnitude"))
    pack(PackRequest(str(tmp_path / "p"), tmp_path / "p.gguf"))
    assert "another model, or another version of it" in verify(tmp_path / "p.gguf", made / "m").problems[0]
    assert verify(tmp_path / "p.gguf", tmp_path / "p").passed


def test_accuracy_is_against_each_model_that_it_was_made_from(made: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT[3000:5000])
    packed(made, "rd", tmp_path / "m.gguf")
    for subject in (made / "rd", tmp_path / "m.gguf"):
        for source in ("r", "m"):
            found = evaluate(
                EvalRequest(
                    str(subject),
                    perplexity=(str(tmp_path / "t.txt"),),
                    protocol="dense",
                    context=32,
                    windows=2,
                    against=str(made / source),
                )
            )
            assert 0 <= found["perplexity"][0]["kl_divergence"]["value"] < 0.1


def test_people_are_told(made: Path, tmp_path: Path) -> None:
    path = packed(made, "rd", tmp_path / "m.gguf")
    described = describe(path)
    assert described["provenance"]["distillation"]["changes"] == described["distilled"]["changes"]
    said = "distilled: all weights of its blocks trained for 50 % skipped: on its calibration text the KL divergence"
    assert said in artifact_table(described)
    assert said in checkpoint_table(inspect(made / "rd"))
    assert "not distilled by sparsepack" in checkpoint_table(inspect(made / "m"))
    card = model_card(path)
    assert "| distilled | all weights of its blocks trained for 50 % skipped" in card
    assert f"--against {made / 'm'}" in card

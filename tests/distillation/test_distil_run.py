"""`distil`: an ordinary checkpoint that skipping harms less, the same after a kill, and what it says of itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_for_tests import make_opt
from safetensors.torch import load_file

from sparsepack import DistilOptions, distil, prune, rotate
from sparsepack.calibrate import folder, training
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.distillation import check_windows, matrices
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import CalibrationError, CheckpointError, DistillationError, OutputError, RotationError
from sparsepack.files.text import Text, read_text
from sparsepack.inspection import inspect
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.provenance import DISTILLATION_FILE, ROTATION_FILE, Distilled, distillation_record
from sparsepack.workers import state as states
from sparsepack.workers.shard import ALONE

FEW = {"steps": 3, "batch": 1, "length": 32}
KINDS = (None, pytest.param(4, marks=pytest.mark.long))
"""Ranks of updates."""


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def kept(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distil") / "c"
    calibrate(tiny, read_text("shipped:train"), made, CalibrateOptions(context=128, samples=8))
    return made


@pytest.fixture(scope="module")
def once(tiny: Checkpoint, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Distilled]:
    """A distilled model and what was said of it; not to be changed."""
    path = tmp_path_factory.mktemp("once") / "d"
    return path, distil(tiny, kept, path, DistilOptions(**FEW))


def test_the_result_is_an_ordinary_checkpoint_whose_matrices_alone_changed(
    tiny: Checkpoint, once: tuple[Path, Distilled]
) -> None:
    from transformers import AutoModelForCausalLM

    path, made = once
    distilled = open_checkpoint(path)
    assert distilled.source.shapes == tiny.source.shapes
    assert {distilled.source.dtypes[name] for name in distilled.source.shapes} == {torch.float32}
    for name in tiny.source.shapes:
        own, found = tiny.tensor(name).double(), distilled.tensor(name).double()
        change = float((found - own).norm() / own.norm())
        assert (change > 0) == (name in made.changes), name
        assert change == pytest.approx(made.changes.get(name, 0.0), rel=1e-3)
    assert set(made.changes) == set(matrices(tiny))
    config = json.loads((path / "config.json").read_text())
    assert config == json.loads((tiny.path / "config.json").read_text()) | {"dtype": "float32"}
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.float32


def test_the_teacher_is_the_model_as_it_was(tiny: Checkpoint, kept: Path, tmp_path: Path) -> None:
    """A training that moves nothing leaves a model that does not differ from its teacher."""
    made = distil(tiny, kept, tmp_path / "d", DistilOptions(rate=1e-12, **FEW))
    assert made.after.prompt == pytest.approx(0, abs=1e-6)
    stored = load_file(tmp_path / "d" / "model.safetensors")
    torch.testing.assert_close(
        stored["model.layers.1.mlp.up_proj.weight"], tiny.tensor("model.layers.1.mlp.up_proj.weight").float()
    )


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(
    request: pytest.FixtureRequest, tiny: Checkpoint, kept: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DistilOptions]:
    """What a run that nothing disturbs makes, and of which options; not to be changed."""
    path, options = tmp_path_factory.mktemp("whole") / "d", DistilOptions(rank=request.param, offsets=True, **FEW)
    distil(tiny, kept, path, options)
    return path, options


@pytest.mark.parametrize("at", [2, "the end", "the writing"])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    at: int | str,
    undisturbed: tuple[Path, DistilOptions],
    tiny: Checkpoint,
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, options = undisturbed
    slices, steps = training.slices, iter(range(99))

    def dies(*_: Any, **__: Any) -> Any:
        raise Killed

    def counted(*given: Any) -> Any:
        if next(steps) == at:
            raise Killed
        return slices(*given)

    with monkeypatch.context() as patch:
        patch.setattr(training, "slices", counted)
        if isinstance(at, str):
            patch.setattr(
                f"sparsepack.calibrate.distillation.{'measured_after' if at == 'the end' else 'write_checkpoint'}", dies
            )
        with pytest.raises(Killed):
            distil(tiny, kept, tmp_path / "again", options)
    assert not (tmp_path / "again").exists()
    taken: list[Any] = []
    monkeypatch.setattr(training, "slices", lambda *given: taken.append(given) or slices(*given))
    distil(tiny, kept, tmp_path / "again", options)
    assert len(taken) == (1 if at == 2 else 0)
    for file in whole.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@pytest.mark.long
def test_another_seed_draws_other_windows(
    tiny: Checkpoint, kept: Path, once: tuple[Path, Distilled], tmp_path: Path
) -> None:
    assert DistilOptions().seed == 0
    assert distil(tiny, kept, tmp_path / "d", DistilOptions(seed=1, **FEW)).changes != once[1].changes


def test_the_record_says_what_was_done(tiny: Checkpoint, kept: Path, once: tuple[Path, Distilled]) -> None:
    path, made = once
    record = json.loads((path / DISTILLATION_FILE).read_text())
    assert (record["schema"], record["kind"]) == (1, "distilled")
    assert record["options"] | FEW == record["options"]
    assert (record["options"]["rate"], record["options"]["rank"]) == (3e-5, None)
    assert record["model_sha256"] == tiny.sha256
    assert record["calibration_sha256"] == folder.load(kept).sha256
    assert (record["tokens"], record["weights"]) == (8 * 32, "float32")
    assert record["after"] == {
        "sparse": made.after.sparse,
        "prompt": made.after.prompt,
        "skipped": made.after.skipped,
    }
    read = distillation_record(path)
    assert read is not None
    assert read.summary["changes"] == made.changes
    assert read.summary["after"] == {"sparse": made.after.sparse, "prompt": made.after.prompt}
    assert distillation_record(tiny.path) is None
    told = inspect(path)["distilled"]["in_words"]
    assert told.startswith("all weights of its blocks trained for 50 % skipped: on its calibration text the KL")


def test_a_damaged_record_is_one_line(once: tuple[Path, Distilled], tmp_path: Path) -> None:
    shutil.copytree(once[0], tmp_path / "d")
    whole = json.loads((tmp_path / "d" / DISTILLATION_FILE).read_text())
    for change in ({"schema": 2}, {"options": None}, {"changes": {"a": 1.5}}, {"after": {"sparse": 1.0}}):
        (tmp_path / "d" / DISTILLATION_FILE).write_text(json.dumps(whole | change))
        with pytest.raises(CheckpointError, match=r"sparsepack_distil\.json: damaged \(.*distil the model again"):
            distillation_record(tmp_path / "d")


def test_weights_are_stored_as_asked(
    tiny: Checkpoint, kept: Path, once: tuple[Path, Distilled], tmp_path: Path
) -> None:
    asked = distil(tiny, kept, tmp_path / "d", DistilOptions(weights="bfloat16", **FEW))
    for path, made, expected in ((*once, torch.float32), (tmp_path / "d", asked, torch.bfloat16)):
        assert open_checkpoint(path).dtype == expected
        assert made.weights == str(expected).removeprefix("torch.")


def test_rotated_it_keeps_that_record_and_pruned_both(tiny: Checkpoint, kept: Path, tmp_path: Path) -> None:
    rotate(tiny, kept, tmp_path / "r")
    calibrate(str(tmp_path / "r"), read_text("shipped:train"), tmp_path / "cr", CalibrateOptions(context=64, samples=2))
    distil(tmp_path / "r", tmp_path / "cr", tmp_path / "d", DistilOptions(rank=2, **FEW))
    prune(tmp_path / "d", tmp_path / "p", PruneOptions(6, 8, method="magnitude"))
    for name in (ROTATION_FILE, DISTILLATION_FILE):
        assert (tmp_path / "p" / name).read_bytes() == (tmp_path / "d" / name).read_bytes()
    assert json.loads((tmp_path / "d" / ROTATION_FILE).read_text())["model_sha256"] == tiny.sha256
    assert (
        json.loads((tmp_path / "d" / DISTILLATION_FILE).read_text())["model_sha256"]
        == open_checkpoint(tmp_path / "r").sha256
    )


def test_what_was_distilled_before_is_refused_in_one_line(
    tiny: Checkpoint, kept: Path, once: tuple[Path, Distilled], tmp_path: Path
) -> None:
    with pytest.raises(DistillationError, match=r"distilled already, from .*; distil that model, with more --steps"):
        distil(once[0], kept, tmp_path / "again")
    with pytest.raises(RotationError, match=r"distilled from .*: rotate that model, then distil it"):
        rotate(once[0], kept, tmp_path / "again")
    prune(once[0], tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
    with pytest.raises(DistillationError, match="distilled already"):
        distil(tmp_path / "pruned", kept, tmp_path / "again")
    with pytest.raises(OutputError, match="exists already"):
        distil(tiny, kept, once[0])
    with pytest.raises(OutputError, match=f"a folder without {DISTILLATION_FILE}"):
        distil(tiny, kept, kept, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity": 0.0}, "sparsity 0: the model would learn to say what it says; expected above 0"),
        ({"sparsity": -0.5}, r"sparsity -0\.5: expected at least 0 and below 1"),
        ({"sparsity": 1.0}, r"sparsity 1\.0: expected at least 0 and below 1"),
        ({"rank": 0}, "rank 0: expected at least 1"),
        ({"rate": 0.0}, r"rate 0\.0: expected above 0"),
        ({"prompt": -1.0}, r"prompt -1\.0: expected at least 0"),
        ({"weights": "int8"}, "'int8': expected one of auto, float32, bfloat16, float16"),
        ({"batch": 9}, "8 windows, of which a step takes 9; calibrate with more --samples"),
        ({"rate": 0.9, **FEW}, r"training changed it by .* of its size, .*; give a smaller --rate"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    changes: dict[str, Any], said: str, tiny: Checkpoint, kept: Path, tmp_path: Path
) -> None:
    with pytest.raises(DistillationError, match=said) as caught:
        distil(tiny, kept, tmp_path / "d", DistilOptions(**changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_windows_of_one_token_are_refused() -> None:
    with pytest.raises(DistillationError, match="windows of 1 token; expected 2 or more"):
        check_windows(8, 1, DistilOptions(), "c")


def test_another_models_calibration_is_refused(small: Checkpoint, kept: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="calibrate this model"):
        distil(small, kept, tmp_path / "d")


def test_a_model_that_no_format_holds_is_distilled_all_the_same(tmp_path: Path, text: Text) -> None:
    model = open_checkpoint(make_opt(tmp_path / "opt"))
    calibrate(model, text, tmp_path / "c", CalibrateOptions(context=32, samples=2))
    made = distil(model, tmp_path / "c", tmp_path / "d", DistilOptions(rank=2, **FEW))
    assert len(made.changes) == 6 * model.layers
    assert open_checkpoint(tmp_path / "d").source.shapes == model.source.shapes


def test_a_large_state_is_announced_with_its_size(
    tiny: Checkpoint, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsepack.calibrate.distillation._WORTH_SAYING", 1)
    distil(tiny, kept, tmp_path / "d", DistilOptions(**FEW))
    assert "what goes on after a kill takes up to" in capsys.readouterr().err


def test_a_state_that_takes_long_to_save_is_saved_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(3, requires_grad=True)
    times: Iterator[float] = iter([0.0, 100.0, 100.0, 107.0, 108.0])
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(states, "SAVE_EVERY", 20.0)
    run = training.Training([{"params": [parameter]}], DistilOptions(steps=9).allocation, ALONE.resume(""))
    run.descend([(parameter.sum(), parameter.sum())])
    assert run.pause == 7 * 20.0

"""`distil` of a pruned model: zeros stay, it learns from the model from before, and it still counts as pruned."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsepack import DistilOptions, EvalRequest, PackRequest, distil, evaluate, pack, prune, verify
from sparsepack.calibrate import training
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.distil import distilled_text
from sparsepack.calibrate.distillation import matrices
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import CalibrationError, CheckpointError, DistillationError
from sparsepack.files.text import read_text
from sparsepack.formats.inspect import describe
from sparsepack.inspection import inspect
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.pattern import Pattern, check_pattern
from sparsepack.models.provenance import DISTILLATION_FILE, PRUNING_FILE, Distilled, pruning_record
from sparsepack.publish.card import model_card

FEW = {"steps": 3, "batch": 1, "length": 32}


@pytest.fixture(scope="module")
def folder(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's calibration in `c`, it pruned and permuted in `p`, all of its sites but two, and the
    calibration of that in `cp`; not to be changed."""
    made = tmp_path_factory.mktemp("pruned")
    options = CalibrateOptions(context=128, samples=16)
    calibrate(tiny, read_text("shipped:train"), made / "c", options)
    ignore = ("blk.0.attn_in", "blk.1.attn_in")
    prune(tiny, made / "p", PruneOptions(6, 8, permute=True, windows=4, ignore=ignore), made / "c")
    calibrate(made / "p", read_text("shipped:train"), made / "cp", options)
    return made


@pytest.fixture(scope="module")
def once(folder: Path) -> tuple[Path, Distilled]:
    """The pruned model distilled in `d`, and what was said of it; not to be changed. So few steps take a small rate."""
    options = DistilOptions(rate=3e-5, steps=30, batch=2, length=128)
    return folder / "d", distil(folder / "p", folder / "c", folder / "d", options)


def zeros_stayed(pruned: Path, made: Path) -> None:
    record = pruning_record(pruned)
    assert record is not None
    before, after = open_checkpoint(pruned), open_checkpoint(made)
    for name in matrices(before):
        own, found = before.tensor(name), after.tensor(name)
        if name.removesuffix(".weight") in record.patterns:
            assert torch.equal(found == 0, own == 0), name
            check_pattern(found, Pattern(6, 8))
        assert not torch.equal(found, own.float()), name


def test_zeros_stay_and_all_else_is_trained(folder: Path, once: tuple[Path, Distilled]) -> None:
    zeros_stayed(folder / "p", once[0])
    assert (once[0] / PRUNING_FILE).read_bytes() == (folder / "p" / PRUNING_FILE).read_bytes()


def test_it_comes_closer_to_the_model_from_before(folder: Path, once: tuple[Path, Distilled], tiny: Checkpoint) -> None:
    path, made = once
    assert made.after.sparse < 0.7 * made.before.sparse
    assert made.after.prompt < 0.7 * made.before.prompt
    assert made.before.skipped == made.after.skipped == 0
    assert (made.model, made.model_sha256) == (str(folder / "p"), open_checkpoint(folder / "p").sha256)
    assert (made.teacher, json.loads((path / DISTILLATION_FILE).read_text())["teacher"]) == (tiny.name, tiny.name)
    found = [
        evaluate(
            EvalRequest(
                str(model),
                perplexity=("shipped:heldout",),
                protocol="dense",
                context=128,
                windows=8,
                against="shipped:tiny",
            )
        )["perplexity"][0]["kl_divergence"]["value"]
        for model in (folder / "p", path)
    ]
    assert found[1] < found[0]


def test_the_whole_chain_packs_and_verifies(folder: Path, tmp_path: Path) -> None:
    prune("shipped:tiny", tmp_path / "p", PruneOptions(6, 8, windows=4), folder / "c")
    distil(tmp_path / "p", folder / "c", tmp_path / "d", DistilOptions(**FEW))
    for kind in ("slide-int8", "slide-fp8"):
        slid = pack(PackRequest(str(tmp_path / "d"), tmp_path / kind, format=kind)).path
        for model, trained in ((tmp_path / "d", False), (tmp_path / "p", True)):
            report = verify(slid, model)
            assert report.passed, report.problems
            assert ("trained since (distilled)" in report.checked[-1]) == trained
        assert "another model, or another version of it" in verify(slid, "shipped:tiny").problems[0]
    provenance = describe(tmp_path / "slide-int8")["provenance"]
    assert provenance["pruning"]["model"] == provenance["distillation"]["teacher"] == "shipped:tiny"
    for against in (tmp_path / "d", tmp_path / "p", "shipped:tiny"):
        request = EvalRequest(str(tmp_path / "slide-int8"), perplexity=("shipped:heldout",), protocol="dense")
        found = evaluate(EvalRequest(**{**vars(request), "context": 64, "windows": 2, "against": str(against)}))
        assert 0 <= found["perplexity"][0]["kl_divergence"]["value"] < 0.1
    card = model_card(tmp_path / "slide-int8")
    assert "| pruned | keep 6 of 8: 21 matrices; by sparsegpt" in card
    assert "| distilled | what pruning left of its blocks trained: on its calibration text the KL divergence" in card
    assert "--against shipped:tiny" in card


def test_people_are_told(once: tuple[Path, Distilled]) -> None:
    path, made = once
    said = distilled_text(made, path)
    assert f"{path}: what pruning left of 21 matrices of {made.model}, trained, stored in float32" in said
    assert "KL divergence from shipped:tiny" in said
    found = inspect(path)
    assert found["pruned"]["matrices"] == {"6 of 8": 15}
    assert found["distilled"]["in_words"].startswith(
        "what pruning left of its blocks trained: on its calibration text the KL divergence from shipped:tiny went from"
    )
    assert "prompts" not in found["distilled"]["in_words"]


def test_it_may_be_trained_for_skipping_too(folder: Path, tmp_path: Path) -> None:
    options = DistilOptions(0.5, offsets=True, **FEW)
    with pytest.raises(CalibrationError, match="calibrate this model"):
        distil(folder / "p", folder / "c", tmp_path / "d", options)
    made = distil(folder / "p", folder / "cp", tmp_path / "d", options)
    assert made.before.skipped == pytest.approx(0.5, abs=0.05)
    assert made.before.prompt > 0
    zeros_stayed(folder / "p", tmp_path / "d")
    told = inspect(tmp_path / "d")["distilled"]["in_words"]
    assert told.startswith("what pruning left of its blocks trained for 50 % skipped")


def test_the_pruned_models_own_calibration_gives_the_same(folder: Path, tmp_path: Path) -> None:
    """Where nothing is skipped, only the text is read of it."""
    of_teacher, own = (
        distil(folder / "p", folder / name, tmp_path / name, DistilOptions(**FEW)) for name in ("c", "cp")
    )
    assert of_teacher.changes == own.changes
    assert (own.options["sparsity"], own.options["rate"]) == (0.0, 1e-4)
    assert of_teacher.calibration_sha256 != own.calibration_sha256


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    sparsity: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DistilOptions(sparsity, **FEW)
    distil(folder / "p", folder / "cp", tmp_path / "whole", options)
    slices, steps = training.slices, iter(range(99))

    def killed(*given: Any) -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return slices(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "slices", killed)
        distil(folder / "p", folder / "cp", tmp_path / "again", options)
    distil(folder / "p", folder / "cp", tmp_path / "again", options)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_the_teacher_is_the_model_that_it_was_pruned_from(folder: Path, tmp_path: Path) -> None:
    few = DistilOptions(**FEW)
    shutil.copytree(folder / "p", tmp_path / "p")
    record = json.loads((tmp_path / "p" / PRUNING_FILE).read_text())
    (tmp_path / "p" / PRUNING_FILE).write_text(json.dumps(record | {"model": str(tmp_path / "gone")}))
    with pytest.raises(DistillationError, match=r"pruned from, and .*gone is not there; give --teacher") as caught:
        distil(tmp_path / "p", folder / "c", tmp_path / "d", few)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        DistillationError, match=r"was pruned from another model, .*gone .*; give that one as --teacher"
    ):
        distil(tmp_path / "p", folder / "c", tmp_path / "d", few, teacher=folder / "p")
    with pytest.raises(CheckpointError, match=r"no such model folder or file"):
        distil(tmp_path / "p", folder / "c", tmp_path / "d", few, teacher=tmp_path / "none")
    with pytest.raises(DistillationError, match=r"teacher shipped:tiny: shipped:tiny was not pruned .*leave --teacher"):
        distil("shipped:tiny", folder / "c", tmp_path / "d", few, teacher="shipped:tiny")
    assert not (tmp_path / "d").exists()
    made = distil(tmp_path / "p", folder / "c", tmp_path / "d", few, teacher="shipped:tiny")
    assert made.teacher == "shipped:tiny"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 4}, "rank 4: an update of a rank would make numbers of a pruned model's zeros; leave it out"),
        ({"offsets": True}, "offsets: no channel is skipped that could have one; leave it out, or give a sparsity"),
    ],
)
def test_what_makes_no_sense_is_one_line(changes: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DistillationError, match=said):
        distil(folder / "p", folder / "c", tmp_path / "d", DistilOptions(**changes))

"""`rotate` with several segments: the same function, in bases of their own, and what that costs."""

import json
from pathlib import Path

import pytest
import torch

from sparsepack import rotate
from sparsepack.calibrate import folder
from sparsepack.calibrate import rotation as run
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.rotate import RotateOptions, rotated_text
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.cli.commands.inspect import checkpoint_table
from sparsepack.errors import PackingError, RotationError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import read_text
from sparsepack.formats.inspect import describe
from sparsepack.formats.open import open_artifact
from sparsepack.formats.verify import verify
from sparsepack.inspection import inspect
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.provenance import ROTATION_FILE, rotation_record
from sparsepack.packing import PackRequest, pack
from sparsepack.publish.card import model_card

IDS = torch.arange(2, 62)[None]
LEARNT = RotateOptions("learnt", segments=2, steps=2, batch=1, length=32)


@pytest.fixture(scope="module")
def three(tiny: Checkpoint, tiny_calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a basis for each of its blocks; not to be changed."""
    made = tmp_path_factory.mktemp("three") / "rotated"
    rotate(tiny, tiny_calibrated, made, RotateOptions(segments=3))
    return made


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = load_model(checkpoint)(IDS).logits
    return found


@pytest.mark.parametrize("options", [RotateOptions(segments=2), LEARNT], ids=lambda options: options.basis)
def test_the_result_computes_the_same(
    options: RotateOptions, tiny: Checkpoint, tiny_calibrated: Path, tmp_path: Path
) -> None:
    made = rotate(tiny, tiny_calibrated, tmp_path / "r", options)
    turned = open_checkpoint(tmp_path / "r")
    assert turned.bases == made.boundaries
    assert len(made.boundaries) == 1
    before, after = logits(tiny), logits(turned)
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert 0 < made.error < 1e-5


def test_learning_turns_each_segment(tiny: Checkpoint, tiny_calibrated: Path, tmp_path: Path) -> None:
    rotate(tiny, tiny_calibrated, tmp_path / "pca", RotateOptions(segments=2))
    rotate(tiny, tiny_calibrated, tmp_path / "learnt", LEARNT)
    start, learnt = (open_checkpoint(tmp_path / name) for name in ("pca", "learnt"))
    assert start.bases == learnt.bases
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        off = (start.tensor(name) - learnt.tensor(name)).norm() / start.tensor(name).norm()
        assert 1e-5 < float(off) < 0.2


def test_everything_says_where_segments_begin(tiny: Checkpoint, three: Path, tmp_path: Path) -> None:
    record = json.loads((three / ROTATION_FILE).read_text())
    assert record["boundaries"] == [1, 2]
    read = rotation_record(three)
    assert read is not None
    assert read.summary["boundaries"] == [1, 2]
    said = "the basis pca of each of 3 segments (from blocks 0, 1 and 2 on)"
    assert f"into {said}: the same function" in checkpoint_table(inspect(three))
    found = describe(_packed(three, tmp_path))
    assert found["provenance"]["rotation"]["boundaries"] == [1, 2]
    card = model_card(tmp_path / "m.gguf")
    assert f"| rotated | into {said} of `{tiny.name}`: the same function |" in card
    assert "the residual stream changes its basis before blocks 1, 2" in card


def _packed(model: Path, folder: Path) -> Path:
    pack(PackRequest(str(model), folder / "m.gguf"))
    return folder / "m.gguf"


def test_the_cost_is_told(tiny: Checkpoint, tiny_calibrated: Path, tmp_path: Path) -> None:
    made = rotate(tiny, tiny_calibrated, tmp_path / "r", RotateOptions(segments=3))
    stored = 2 * 256**2 * 4
    packed = 2 * 256**2 // 32 * 34
    blocks = sum(rows * columns for rows, columns in map(tiny.stacked_shape, tiny.family.projections)) * tiny.layers
    share = 100 * packed / (blocks // 256 * 144)
    (note,) = (note for note in made.notes if "of basis" in note)
    assert note == (
        f"2 changes of basis between segments, 256 x 256 each: {stored:,} bytes more in float32; packed {packed:,} in "
        f"Q8_0, all of which each token reads: {share:.1f} % of what the blocks' matrices are in Q4_K"
    )
    assert note in rotated_text(made, tmp_path / "r")
    tensors = open_artifact(_packed(tmp_path / "r", tmp_path)).tensors
    assert sum(tensors[f"blk.{layer}.basis.weight"].nbytes for layer in (1, 2)) == packed


@pytest.mark.parametrize("at", [1, 2, "the writing"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(
    at: int | str, tiny: Checkpoint, tiny_calibrated: Path, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = run.block_of

    def interrupted(view: Checkpoint, layer: int) -> dict[str, torch.Tensor]:
        if layer == at:
            raise KeyboardInterrupt
        return block(view, layer)

    def never(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="goes on from there"):
        patch.setattr(run, "block_of", interrupted)
        if isinstance(at, str):
            patch.setattr(run, "write_checkpoint", never)
        rotate(tiny, tiny_calibrated, tmp_path / "rotated", RotateOptions(segments=3))
    monkeypatch.setattr("sparsepack.calibrate.pca.bases", never)  # they were kept
    rotate(tiny, tiny_calibrated, tmp_path / "rotated", RotateOptions(segments=3))
    for file in three.iterdir():
        assert file.read_bytes() == (tmp_path / "rotated" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RotateOptions("hadamard", segments=2), "segments 2: it is for basis pca or learnt, not hadamard"),
        (RotateOptions(segments=0), "segments 0: expected at least 1"),
        (RotateOptions(segments=4), "4 segments of 3 blocks; expected at most 3$"),
    ],
)
def test_segments_that_cannot_be_are_one_line(
    options: RotateOptions, said: str, tiny: Checkpoint, tiny_calibrated: Path, tmp_path: Path
) -> None:
    with pytest.raises(RotationError, match=said) as caught:
        rotate(tiny, tiny_calibrated, tmp_path / "r", options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_model_with_segments_is_not_rotated_again(tiny_calibrated: Path, three: Path, tmp_path: Path) -> None:
    with pytest.raises(RotationError, match="rotated already, into the basis pca of"):
        rotate(three, tiny_calibrated, tmp_path / "r")


def test_formats_without_a_place_for_it_refuse_in_one_line(three: Path, tmp_path: Path) -> None:
    prune(three, tmp_path / "p", PruneOptions(6, 8, method="magnitude"))
    said = r"changes its basis before block 1, for which .* has no place"
    for model, kind in ((three, "q4_k"), (three, "f16"), (tmp_path / "p", "slide-int8")):
        with pytest.raises(PackingError, match=said) as caught:
            pack(PackRequest(str(model), tmp_path / "m", format=kind))
        assert "\n" not in str(caught.value)


@pytest.mark.long
def test_what_skips_columns_of_it_is_measured_beside_the_model_from_before(
    tiny: Checkpoint, tiny_calibration: Calibration, tmp_path: Path
) -> None:
    """All the way: calibrated again, packed with thresholds, verified, and compared with what it was made from."""
    folder.save(tiny_calibration, tmp_path / "c")
    rotate(tiny, tmp_path / "c", tmp_path / "r", RotateOptions(segments=2))
    calibrate(
        tmp_path / "r", read_text("shipped:train"), tmp_path / "cr", CalibrateOptions(context=128, samples=16, batch=8)
    )
    asked = AllocationOptions(0.5, windows=4)
    pack(PackRequest(str(tmp_path / "r"), tmp_path / "m.gguf", calibration=tmp_path / "cr", allocation=asked))
    for against in (tmp_path / "r", tiny):
        report = verify(tmp_path / "m.gguf", against)
        assert report.passed, report.problems
    request = EvalRequest(
        str(tmp_path / "m.gguf"), perplexity=("shipped:heldout",), context=64, windows=4, against=tiny.name
    )
    row = evaluate(request)["perplexity"][0]
    assert 0 < row["kl_divergence"]["value"] < 0.5
    share = 1 - 256**2 / (
        256**2 + tiny.layers * sum(a * b for a, b in map(tiny.stacked_shape, tiny.family.projections))
    )
    skipped = row["realised_sparsity"]
    assert skipped["overall"] == pytest.approx(skipped["of_sparse_sites"] * share)

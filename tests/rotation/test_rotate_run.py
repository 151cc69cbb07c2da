"""`rotate`: an ordinary checkpoint that computes the same, whole or not at all."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import make_model, make_opt
from safetensors.torch import load_file, save_file

from sparsepack import prune, rotate
from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import PRODUCT, Calibration
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import BOUNDS
from sparsepack.errors import CalibrationError, CheckpointError, OutputError, RotationError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.rotated import Bases, rotated
from sparsepack.models.checkpoint.writer import write_checkpoint
from sparsepack.models.family import HEAD
from sparsepack.models.provenance import PRUNING_FILE, ROTATION_FILE, rotation_record


@pytest.fixture(scope="session")
def calibration(small_calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rotate") / "calibration"
    folder.save(small_calibration, path)
    return path


def without_moments(calibration: Calibration) -> Calibration:
    """As a sparsepack from before made it."""
    layers = [{name: value for name, value in layer.items() if name != PRODUCT} for layer in calibration.layers]
    manifest = {name: value for name, value in calibration.manifest.items() if name != "residual"}
    return replace(calibration, layers=tuple(layers), manifest=manifest)


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """What stock transformers makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    return found


@pytest.mark.parametrize("basis", ["pca", "hadamard"])
def test_the_result_is_an_ordinary_checkpoint_that_computes_the_same(
    basis: str, small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    made = rotate(small, calibration, tmp_path / "rotated", RotateOptions(basis))
    ids = torch.arange(3, 60)[None]
    before, after = logits(small.path, ids), logits(tmp_path / "rotated", ids)
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert 0 < made.error < 1e-5
    turned = open_checkpoint(tmp_path / "rotated")
    assert turned.source.shapes == small.source.shapes
    assert {turned.source.dtypes[name] for name in turned.source.shapes} == {torch.float32}
    assert not torch.allclose(
        turned.tensor("model.embed_tokens.weight"), small.tensor("model.embed_tokens.weight").float()
    )
    assert turned.tokenizer_json() == small.tokenizer_json()
    config = json.loads((tmp_path / "rotated" / "config.json").read_text())
    original = json.loads((small.path / "config.json").read_text())
    assert config == original | {"dtype": "float32", "tie_word_embeddings": False}


def test_the_record_says_what_was_done(small: Checkpoint, calibration: Path, tmp_path: Path) -> None:
    made = rotate(small, calibration, tmp_path / "rotated", RotateOptions("hadamard", seed=5))
    record = json.loads((tmp_path / "rotated" / ROTATION_FILE).read_text())
    assert (record["schema"], record["kind"]) == (1, "rotated")
    assert (record["options"]["basis"], record["options"]["seed"]) == ("hadamard", 5)
    assert record["model_sha256"] == small.sha256
    assert record["calibration_sha256"] == folder.load(calibration).sha256
    assert (record["tokens"], record["error"], record["weights"]) == (4 * 63, made.error, "float32")
    read = rotation_record(tmp_path / "rotated")
    assert read is not None
    assert read.summary == {
        "basis": "hadamard",
        "boundaries": [],
        "seed": 5,
        "weights": "float32",
        "error": made.error,
        "model": small.name,
        "model_sha256": small.sha256,
        "calibration_sha256": record["calibration_sha256"],
    }
    assert rotation_record(small.path) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_a_mixture_is_an_ordinary_checkpoint_that_computes_the_same(family: str, text: Text, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", family))
    calibrate(model, text, tmp_path / "c", CalibrateOptions(context=32, samples=2))
    rotate(model, tmp_path / "c", tmp_path / "rotated")
    ids = torch.arange(3, 60)[None]
    before, after = logits(model.path, ids), logits(tmp_path / "rotated", ids)
    assert float((after - before).norm() / before.norm()) < 1e-5
    turned = open_checkpoint(tmp_path / "rotated")
    experts = model.family.experts
    assert experts is not None
    for name in (f"{experts.router}.weight", *experts.parameters):
        name = f"model.layers.1.{name}"
        assert not torch.allclose(turned.tensor(name), model.tensor(name).float(), atol=1e-3)


def test_a_tie_is_lost_and_its_bytes_are_told(text: Text, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", "qwen3"))
    calibrate(model, text, tmp_path / "c", CalibrateOptions(context=32, samples=2))
    made = rotate(model, tmp_path / "c", tmp_path / "rotated")
    turned = open_checkpoint(tmp_path / "rotated")
    assert (model.tied, turned.tied) == (True, False)
    assert not torch.equal(turned.tensor(HEAD), turned.tensor("model.embed_tokens.weight"))
    assert any(
        f"tied) and is a matrix of its own now: {512 * 256 * 4:,} bytes more in float32" in n for n in made.notes
    )
    size = sum((tmp_path / "m" / "model.safetensors").stat().st_size - 8 for _ in "1")
    stored = next(note for note in made.notes if "stored in float32, not in bfloat16" in note)
    before = int(stored.rpartition(" ")[2].replace(",", ""))
    assert 0 <= size - before < 10_000


@pytest.mark.parametrize(("weights", "own"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_are_stored_as_asked(
    weights: str, own: torch.dtype, small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    made = rotate(small, calibration, tmp_path / "rotated", RotateOptions(weights=weights))
    turned = open_checkpoint(tmp_path / "rotated")
    assert turned.dtype == turned.config.dtype == own
    assert any("stored in float32" in note for note in made.notes) == (weights == "auto")
    assert (made.error < 1e-5) == (weights == "auto")


def test_a_float32_model_keeps_its_type_and_says_nothing_of_it(
    small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(small.path, dtype=torch.float32).save_pretrained(tmp_path / "m")
    small.tokenizer.save_pretrained(tmp_path / "m")
    model = open_checkpoint(tmp_path / "m")
    calibrate(
        model, Text("t", ("the quick brown fox " * 80,), "t"), tmp_path / "c", CalibrateOptions(context=32, samples=2)
    )
    assert len(rotate(model, tmp_path / "c", tmp_path / "rotated").notes) == 1


@pytest.mark.parametrize("at", [0, 1, 2, "the check", "the writing"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(
    at: int | str, small: Checkpoint, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsepack.calibrate import rotation as run

    rotate(small, calibration, tmp_path / "whole")
    block, layers, searches = run.block_of, [], []

    def interrupted(view: Checkpoint, layer: int) -> Any:
        layers.append(layer)
        if layer == at and layers.count(layer) == 1:
            raise KeyboardInterrupt
        return block(view, layer)

    def never(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def searched(moments: torch.Tensor) -> torch.Tensor:
        searches.append(moments)
        return directions(moments)

    from sparsepack.calibrate.pca import directions

    monkeypatch.setattr(run, "block_of", interrupted)
    monkeypatch.setattr("sparsepack.calibrate.pca.directions", searched)
    with monkeypatch.context() as once:
        if isinstance(at, str):
            once.setattr(run, {"the check": "relative_error", "the writing": "write_checkpoint"}[at], never)
        with pytest.raises(KeyboardInterrupt, match="goes on from there"):
            rotate(small, calibration, tmp_path / "rotated")
    assert not (tmp_path / "rotated").exists()
    rotate(small, calibration, tmp_path / "rotated")
    assert layers == ([0, 1, 2] if isinstance(at, str) else [*range(at + 1), *range(at, 3)])
    assert len(searches) == 1 + 3 * 2  # once: of the stream, and of the values of each KV head
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "rotated" / file.name).read_bytes(), file.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotated", "whole"]


def test_a_model_that_computes_something_else_is_not_written(
    small: Checkpoint, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would whose norms do more than they should."""

    def slightly_wrong(checkpoint: Checkpoint, bases: Bases, *rest: Any) -> Checkpoint:
        (basis,) = bases.matrices
        wrong = basis + 1e-4 * torch.randn(basis.shape, dtype=torch.float64)
        return rotated(checkpoint, Bases(matrices=(wrong,)), *rest)

    monkeypatch.setattr("sparsepack.calibrate.rotation.rotated", slightly_wrong)
    with pytest.raises(
        RotationError, match=r"its logits differ by .* float32 explains at most 1e-05; nothing was written"
    ):
        rotate(small, calibration, tmp_path / "rotated")
    assert not list(tmp_path.iterdir())


def test_the_bounds_are_of_all_types_and_the_one_of_the_issue() -> None:
    assert BOUNDS[torch.float32] == 1e-5
    assert set(BOUNDS) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def test_a_large_result_is_several_files_that_anything_loads(
    small: Checkpoint, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotate(small, calibration, tmp_path / "whole")
    monkeypatch.setattr(
        "sparsepack.calibrate.rotation.write_checkpoint", partial(write_checkpoint, shard_bytes=500_000)
    )
    rotate(small, calibration, tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    ids = torch.arange(3, 12)[None]
    assert torch.equal(logits(tmp_path / "parts", ids), logits(tmp_path / "whole", ids))


def test_a_gguf_becomes_a_folder(tmp_path: Path) -> None:
    from sparsepack.packing import PackRequest, pack

    pack(PackRequest("shipped:tiny", tmp_path / "m.gguf", format="f16"))
    calibrate(tmp_path / "m.gguf", "shipped:heldout", tmp_path / "c", CalibrateOptions(context=32, samples=2))
    assert rotate(tmp_path / "m.gguf", tmp_path / "c", tmp_path / "rotated").error < 1e-5
    ids = open_checkpoint(tmp_path / "rotated").tokenizer("It was a dark night")["input_ids"]
    assert ids == open_checkpoint("shipped:tiny").tokenizer("It was a dark night")["input_ids"]


def test_a_rotated_model_can_be_pruned_and_keeps_its_record(
    small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    rotate(small, calibration, tmp_path / "rotated")
    prune(tmp_path / "rotated", tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
    records = [json.loads((tmp_path / "pruned" / name).read_text()) for name in (ROTATION_FILE, PRUNING_FILE)]
    assert records[0]["model_sha256"] == small.sha256
    assert records[1]["model_sha256"] == open_checkpoint(tmp_path / "rotated").sha256
    assert (tmp_path / "pruned" / ROTATION_FILE).read_bytes() == (tmp_path / "rotated" / ROTATION_FILE).read_bytes()


def test_what_was_rotated_or_pruned_before_is_refused_in_one_line(
    small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    rotate(small, calibration, tmp_path / "rotated")
    with pytest.raises(RotationError, match=r"rotated: rotated already, into the basis pca of .*; rotate that model"):
        rotate(tmp_path / "rotated", calibration, tmp_path / "again")
    prune(small, tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
    with pytest.raises(RotationError, match="its zeros would be numbers: rotate that model, then prune it"):
        rotate(tmp_path / "pruned", calibration, tmp_path / "again")
    with pytest.raises(OutputError, match="exists already"):
        rotate(small, calibration, tmp_path / "rotated")
    rotate(small, calibration, tmp_path / "rotated", overwrite=True)
    with pytest.raises(OutputError, match=f"a folder without {ROTATION_FILE}"):
        rotate(small, calibration, tmp_path / "pruned", overwrite=True)


def test_a_calibration_without_second_moments_is_refused_by_pca_alone(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path
) -> None:
    folder.save(without_moments(small_calibration), tmp_path / "old")
    with pytest.raises(RotationError, match=f"make it again: sparsepack calibrate {small.name} --text TEXT -o FOLDER"):
        rotate(small, tmp_path / "old", tmp_path / "rotated")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    rotate(small, tmp_path / "old", tmp_path / "rotated", RotateOptions("hadamard"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"basis": "random"}, "'random': expected one of pca, hadamard"),
        ({"seed": -1}, "seed -1: expected at least 0"),
        ({"seed": 3}, "seed 3: it is for basis hadamard or learnt, not pca"),
        ({"weights": "int8"}, "'int8': expected one of auto, float32, bfloat16, float16"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    small: Checkpoint, calibration: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RotationError, match=said):
        rotate(small, calibration, tmp_path / "rotated", RotateOptions(**changes))
    assert not list(tmp_path.iterdir())


def test_another_models_calibration_and_another_family_are_one_line(
    small: Checkpoint, tiny: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(CalibrationError, match="calibrate this model"):
        rotate(tiny, calibration, tmp_path / "rotated")
    with pytest.raises(CheckpointError, match="opt models cannot be rotated"):
        rotate(make_opt(tmp_path / "opt"), calibration, tmp_path / "rotated")
    with pytest.raises(CheckpointError, match="opt models cannot be rotated"):
        rotate(tmp_path / "opt", calibration, tmp_path / "rotated", RotateOptions("hadamard"))
    assert not (tmp_path / "rotated").exists()


def test_weights_that_are_not_finite_are_named(calibration: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "qwen2", num_hidden_layers=3)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(model)
    found = folder.load(calibration)
    found.manifest["model"]["sha256"] = checkpoint.sha256
    folder.save(found, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are NaN or infinite"):
        rotate(model, tmp_path / "c", tmp_path / "rotated")
    assert not (tmp_path / "rotated").exists()


def test_a_damaged_record_is_one_line(small: Checkpoint, calibration: Path, tmp_path: Path) -> None:
    rotate(small, calibration, tmp_path / "rotated")
    for change in ({"schema": 2}, {"options": None}, {"model_sha256": 3}):
        record = json.loads((tmp_path / "rotated" / ROTATION_FILE).read_text())
        (tmp_path / "rotated" / ROTATION_FILE).write_text(json.dumps(record | change))
        with pytest.raises(CheckpointError, match=r"sparsepack_rotate\.json: damaged \(.*rotate the model again"):
            rotation_record(tmp_path / "rotated")
        (tmp_path / "rotated" / ROTATION_FILE).write_text(json.dumps(record))


@pytest.mark.long
def test_a_trained_model_computes_the_same(silu: Checkpoint, silu_calibration: Calibration, tmp_path: Path) -> None:
    folder.save(silu_calibration, tmp_path / "c")
    made = rotate(silu, tmp_path / "c", tmp_path / "rotated")
    assert made.error < 2e-6

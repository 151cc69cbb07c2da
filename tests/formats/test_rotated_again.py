"""`verify --against` the model that was rotated: it is rotated again, into the basis of the artifact's embedding."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_variants import FOLDERS
from models_for_tests import TEXT, make_model
from safetensors.torch import load_file, save_file

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import rotate
from sparsepack.files.text import Text
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.inspect import describe
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.provenance import ROTATION_FILE
from sparsepack.packing import PackRequest, pack


def make_rotated(
    folder: Path, basis: str = "pca", segments: int = 1, **changes: object
) -> tuple[Checkpoint, Checkpoint]:
    """A random model, and what `rotate` makes of it."""
    model = open_checkpoint(make_model(folder / "m", **changes))
    calibrate(model, Text("topics", (TEXT[:2000],), "topics"), folder / "c", CalibrateOptions(context=32, samples=4))
    rotate(model, folder / "c", folder / "rotated", RotateOptions(basis, segments))
    return model, open_checkpoint(folder / "rotated")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A llama with all the biases that there are, and the same rotated."""
    return make_rotated(tmp_path_factory.mktemp("pair"), **FOLDERS["llama, biases"], hidden_act="relu")


def packed(model: Checkpoint, path: Path, kind: str = "zigzag-q4_k", **asked: str) -> Path:
    pack(PackRequest(str(model.path), path, format=kind, **asked))
    return path


@pytest.mark.parametrize("kind", ["zigzag-q4_k", pytest.param("zigzag-q4_k, all in 4 bits", marks=pytest.mark.long)])
def test_a_zigzag_file_is_the_source_model(kind: str, pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    types = {"embedding_type": "q4_k", "output_type": "q4_k"} if "," in kind else {}
    path = packed(pair[1], tmp_path / "m.gguf", **types)
    own, again = verify(path, pair[1]), verify(path, pair[0])
    assert own.passed, own.problems
    assert again.passed, again.problems
    assert again.checked[-1].startswith(
        f"weights of {pair[0].name} in the artifact's basis, found from its embedding to"
    )
    assert [t.name for t in own.tensors] == [t.name for t in again.tensors]
    for one, other in zip(own.tensors, again.tensors, strict=True):
        of_heads = "attn_in" in other.name or "attn_out" in other.name
        assert other.error == pytest.approx(one.error, abs=0.06 if types else 0.02 if of_heads else 0.012)
        most = (0.18 if types else 0.04) + 0.09 * of_heads
        assert BLOCKS[other.type].error <= other.bound < BLOCKS[other.type].error + most
        turned = not one.name.endswith(("norm.weight", "mlp_in.bias"))
        assert (BLOCKS[other.type].error < other.bound) == turned, one.name
    assert next(t for t in again.tensors if t.name == "blk.1.mlp_mid.bias").error > 0  # turned, and stored as it is


@pytest.mark.parametrize(
    "kind", ["q4_k", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("f16", "bf16")), "f32"]
)
def test_a_plain_file_is_the_source_model(kind: str, tmp_path: Path) -> None:
    model, turned = make_rotated(tmp_path, family="qwen3")
    report = verify(packed(turned, tmp_path / "m.gguf", kind), model)
    assert report.passed, report.problems
    assert {"token_embd.weight", "output.weight"} <= {t.name for t in report.tensors}  # tied no more
    if kind == "f32":
        assert max(t.error for t in report.tensors) < 1e-6


def test_neurons_and_their_records_are_turned(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    model, turned = make_rotated(tmp_path, hidden_act="relu")
    pack(
        PackRequest(
            str(turned.path), tmp_path / "m.gguf", format="neuron-q4_k", calibration=recalibrated(turned, tmp_path)
        )
    )
    report = verify(tmp_path / "m.gguf", model)
    assert report.passed, report.problems


FOUR = {"family": "qwen2", "hidden_act": "relu", "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A model of four blocks, and the same with a basis for each; not to be changed."""
    folder = tmp_path_factory.mktemp("segments")
    return make_rotated(folder, segments=4, **FOUR)


@pytest.mark.parametrize("kind", ["zigzag-q4_k", pytest.param("neuron-q4_k", marks=pytest.mark.long)])
def test_each_segment_is_the_source_model(kind: str, segmented: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    calibration = recalibrated(segmented[1], tmp_path) if kind == "neuron-q4_k" else None
    fitting = RefitOptions(quantiser="round")  # error feedback would widen the bounds
    path = tmp_path / "m.gguf"
    pack(PackRequest(str(segmented[1].path), path, format=kind, calibration=calibration, fitting=fitting))
    own, again = verify(path, segmented[1]), verify(path, segmented[0])
    assert again.passed, again.problems
    assert "in the artifact's bases, found from its embedding and 3 changes of basis to within" in again.checked[-1]
    bounds = {t.name: t.bound for t in again.tensors}
    for one, other in zip(own.tensors, again.tensors, strict=True):
        assert other.error == pytest.approx(one.error, abs=0.02)
        of_heads = "attn_in" in other.name or "attn_out" in other.name
        assert other.bound < BLOCKS[other.type].error + 0.06 + 0.09 * of_heads
    matrix = "mlp_in.weight" if kind == "zigzag-q4_k" else "mlp_gate.weight"
    in_order = [bounds[f"blk.{layer}.{matrix}"] for layer in (0, 1, 3)]
    assert in_order == sorted(set(in_order))  # less and less sure
    assert bounds["output.weight"] > BLOCKS["Q6_K"].error


@pytest.mark.long
def test_two_segments_are_the_source_model(tmp_path: Path) -> None:
    model, turned = make_rotated(tmp_path, segments=2, family="qwen3")
    report = verify(packed(turned, tmp_path / "m.gguf"), model)
    assert report.passed, report.problems
    assert "found from its embedding and 1 change of basis to within" in report.checked[-1]


@pytest.mark.parametrize(
    ("tensor", "failing"),
    [
        ("model.layers.3.self_attn.o_proj.weight", ["blk.3.attn_out.weight"]),
        ("model.layers.2.mlp.up_proj.weight", ["blk.2.mlp_in.weight"]),
    ],
)
def test_a_matrix_of_another_model_in_a_later_segment_fails(
    tensor: str, failing: list[str], segmented: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    other = open_checkpoint(make_model(tmp_path / "other", seed=1, **FOUR)).tensor(tensor).float()
    report = verify(packed(_changed(segmented[1], tmp_path, {tensor: other}), tmp_path / "m.gguf"), segmented[0])
    assert [t.name for t in report.tensors if not t.passed] == failing


def test_a_matrix_between_segments_that_is_not_orthogonal_is_one_line(
    segmented: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    name = segmented[1].family.basis(2)
    model = _changed(segmented[1], tmp_path, {name: torch.randn(segmented[1].source.shapes[name])})
    (problem,) = verify(packed(model, tmp_path / "m.gguf"), segmented[0]).problems
    assert "blk.2.basis.weight does not say in which basis the model is" in problem


def test_another_basis_than_the_weights_have_fails(segmented: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    """One change of basis turns elsewhere, and the segments behind it do not know."""
    name = segmented[1].family.basis(3)
    model = _changed(segmented[1], tmp_path, {name: segmented[1].tensor(name).flip(0).contiguous()})
    failed = {t.name for t in verify(packed(model, tmp_path / "m.gguf"), segmented[0]).tensors if not t.passed}
    assert {"blk.3.attn_in.weight", "blk.3.mlp_mid.weight", "output.weight"} <= failed
    assert all(n.startswith(("blk.3.", "output.")) for n in failed)


def _changed(model: Checkpoint, folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """The same folder with other tensors."""
    shutil.copytree(model.path, folder / "changed")
    path = folder / "changed" / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    return open_checkpoint(folder / "changed")


def recalibrated(model: Checkpoint, folder: Path) -> Path:
    calibrate(model, Text("t", (TEXT[:2000],), "t"), folder / "again", CalibrateOptions(context=32, samples=2))
    return folder / "again"


def test_the_manifest_says_from_what_it_was_rotated(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    path = packed(pair[1], tmp_path / "m.gguf")
    rotation = describe(path)["provenance"]["rotation"]
    record = json.loads((pair[1].path / ROTATION_FILE).read_text())
    assert (rotation["basis"], rotation["model"], rotation["model_sha256"]) == ("pca", pair[0].name, pair[0].sha256)
    assert (rotation["error"], rotation["calibration_sha256"]) == (record["error"], record["calibration_sha256"])
    unrotated = packed(pair[0], tmp_path / "own.gguf")
    assert describe(unrotated)["provenance"]["rotation"] is None


def test_another_model_is_another_model(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    path = packed(pair[1], tmp_path / "m.gguf")
    other = open_checkpoint(make_model(tmp_path / "other", **FOLDERS["llama, biases"], hidden_act="relu", seed=1))
    report = verify(path, other)
    assert "another model, or another version of it" in report.problems[0]
    assert not any(t.passed for t in report.tensors if t.type == "Q4_K")


def test_weights_that_are_not_those_of_the_source_in_that_basis_fail(
    pair: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    """A file that says it is of this model: one matrix is turned into another basis than the embedding."""
    model, turned = make_rotated(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    turned = _changed(turned, tmp_path, {name: turned.tensor(name).flip(1).contiguous()})
    report = verify(packed(turned, tmp_path / "m.gguf"), model)
    assert [t.name for t in report.tensors if not t.passed] == ["blk.1.mlp_in.weight"]


def test_a_model_that_was_pruned_since_is_another_model_than_its_source(tmp_path: Path) -> None:
    model, turned = make_rotated(tmp_path)
    prune(turned, tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
    path = packed(open_checkpoint(tmp_path / "pruned"), tmp_path / "m.gguf")
    assert verify(path, tmp_path / "pruned").passed
    assert "another model, or another version of it" in verify(path, model).problems[0]
    assert describe(path)["provenance"]["rotation"]["model_sha256"] == model.sha256


def test_an_embedding_that_does_not_span_the_stream_is_one_line(tmp_path: Path) -> None:
    """Fewer tokens than channels."""
    model, turned = make_rotated(
        tmp_path, hidden_size=640, num_attention_heads=5, num_key_value_heads=5, basis="hadamard"
    )
    report = verify(packed(turned, tmp_path / "m.gguf"), model)
    (problem,) = report.problems
    assert "its embedding does not say in which basis the model is" in problem
    assert problem.endswith("give --against the rotated checkpoint")
    assert report.checked[-1] == "padding"

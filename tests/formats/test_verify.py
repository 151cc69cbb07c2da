"""`verify` and `inspect`: intact files pass, other models and damage are named."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import plan_zigzag, write_plain, write_zigzag
from models_for_tests import LLAMA_CPP, SMALL, make_model, row
from pairwise import each_value

from sparsepack.errors import ArtifactError
from sparsepack.formats.inspect import describe
from sparsepack.formats.manifest import weight_changes
from sparsepack.formats.open import open_artifact
from sparsepack.formats.orders import zigzag
from sparsepack.formats.plan import PlannedGroup, alone
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.experts import part_shapes

Checkpoints, Files = dict[str, Checkpoint], dict[str, Path]


@pytest.mark.parametrize("name", [*SMALL, "odd"])
def test_zigzag_files_are_their_models(checkpoints: Checkpoints, zigzag_files: Files, name: str) -> None:
    report = verify(zigzag_files[name], checkpoints[name])
    assert report.passed, report.problems
    assert {t.name for t in report.tensors} >= {"blk.0.attn_in.weight", "blk.1.mlp_mid.weight", "token_embd.weight"}
    assert max(t.error for t in report.tensors if t.type == "F32") == 0
    assert all(0.06 < t.error < 0.09 for t in report.tensors if t.type == "Q4_K")


@each_value({"kind": ["q4_k", "f16", "bf16", "f32"], "family": LLAMA_CPP})
def test_plain_files_are_their_models(
    llama_cpp_checkpoints: Checkpoints, tmp_path: Path, family: str, kind: str
) -> None:
    checkpoint = llama_cpp_checkpoints[family]
    write_plain(checkpoint, tmp_path / "m.gguf", type=kind)
    report = verify(tmp_path / "m.gguf", checkpoint)
    assert report.passed, report.problems
    shapes = checkpoint.source.shapes
    assert len(report.tensors) == len(shapes) + len(part_shapes(row(family), shapes)) // 2


@pytest.mark.parametrize("kind", ["zigzag-q4_k", "q4_k", "f16", "f32"])
def test_rows_are_decoded_as_the_whole_is(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    """Any rows: those of one band, of several, of the last one that is padded."""
    path = tmp_path / "m.gguf"
    name = "odd" if kind == "zigzag-q4_k" else "llama"
    write_zigzag(checkpoints[name], {}, path) if name == "odd" else write_plain(checkpoints[name], path, type=kind)
    artifact = open_artifact(path)
    for tensor, info in artifact.tensors.items():
        whole = artifact.decoded(tensor)
        assert tuple(whole.shape) == artifact.logical_shape(tensor)
        if len(info.shape) == 1:
            continue
        rows = len(whole)
        for first, last in ((0, 256), (256, 512), (3, 5), (rows - 1, rows), (0, rows + 300), (250, 260)):
            if first >= rows:
                continue
            assert torch.equal(artifact.decoded(tensor, first, last), whole[first:last]), (tensor, first, last)


def test_pieces_add_up_to_the_error_of_the_whole(
    checkpoints: Checkpoints, zigzag_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = verify(zigzag_files["odd"], checkpoints["odd"])
    monkeypatch.setattr("sparsepack.formats.verify._PIECE", 1)
    pieces = verify(zigzag_files["odd"], checkpoints["odd"])
    artifact = open_artifact(zigzag_files["odd"])
    for one, other in zip(whole.tensors, pieces.tensors, strict=True):
        source = artifact.source(one.name, checkpoints["odd"])
        assert source is not None
        expected = float((artifact.decoded(one.name).double() - source.double()).norm() / source.double().norm())
        assert one.error == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert other.error == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_report_is_json(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    report = json.loads(json.dumps(verify(zigzag_files["llama"], checkpoints["llama"]).to_json()))
    assert report["passed"] is True
    assert report["kind"] == "zigzag-q4_k"
    assert report["tensors"][0]["passed"] is True


def test_another_model_of_the_same_shapes_fails_by_hash_and_by_weights(zigzag_files: Files, tmp_path: Path) -> None:
    other = open_checkpoint(make_model(tmp_path / "model", "llama", seed=1))
    report = verify(zigzag_files["llama"], other)
    assert not report.passed
    assert "another model, or another version of it" in report.problems[0]
    errors = {t.name: t.error for t in report.tensors}
    assert errors["blk.0.attn_in.weight"] == pytest.approx(2**0.5, rel=0.02)
    assert not any(t.passed for t in report.tensors)


def test_another_version_with_nearly_the_same_weights_fails_by_hash_alone(
    checkpoints: Checkpoints, zigzag_files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_plain(checkpoints["llama"], path, type="f32")
    report = verify(zigzag_files["llama"], open_checkpoint(path))
    assert len(report.problems) == 1
    assert all(t.passed for t in report.tensors)


def test_another_family_or_size_fails(checkpoints: Checkpoints, zigzag_files: Files, tmp_path: Path) -> None:
    assert not verify(zigzag_files["llama"], checkpoints["qwen2"]).passed
    smaller = open_checkpoint(make_model(tmp_path / "model", "llama", num_hidden_layers=1, intermediate_size=256))
    problems = verify(zigzag_files["llama"], smaller).problems
    assert any("blk.0.mlp_in.weight: [1024, 256] in the file, [512, 256]" in problem for problem in problems)
    assert any("blk.1.mlp_in.weight: [1024, 256] in the file, None" in problem for problem in problems)


def test_a_damaged_file_fails_and_is_not_compared(
    checkpoints: Checkpoints, zigzag_files: Files, tmp_path: Path
) -> None:
    data = bytearray(zigzag_files["llama"].read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    report = verify(tmp_path / "m.gguf", checkpoints["llama"])
    assert not report.passed
    assert "does not match the SHA-256" in report.problems[0]
    assert report.tensors == ()
    (tmp_path / "text.gguf").write_text("no GGUF")
    assert not verify(tmp_path / "text.gguf").passed
    with pytest.raises(ArtifactError, match=r"none\.gguf: no such file or folder"):  # the user's mistake, no damage
        verify(tmp_path / "none.gguf")


def test_a_wrong_matrix_is_named(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = zigzag.pack
    # The rows of `down` in another order: the hashes are right, the model is not.
    monkeypatch.setattr(zigzag, "pack", lambda w, *how: pack(w.flip(0) if w.shape[1] == 512 else w, *how))
    write_zigzag(checkpoints["llama"], {}, tmp_path / "m.gguf")
    report = verify(tmp_path / "m.gguf", checkpoints["llama"])
    assert [t.name for t in report.tensors if not t.passed] == ["blk.0.mlp_mid.weight", "blk.1.mlp_mid.weight"]


def test_padding_that_is_not_zero_is_found(checkpoints: Checkpoints, tmp_path: Path) -> None:
    plan, full = plan_zigzag(checkpoints["odd"], {}), torch.randn(768, 256)
    dirty = [
        PlannedGroup(group.tensors[:2], lambda: (zigzag.pack(full[:512]), zigzag.pack_tail(full[512:640])))
        if group.tensors[0].name == "blk.0.mlp_in.weight"
        else group
        for group in plan.groups
    ]
    dataclasses.replace(plan, groups=tuple(dirty)).write(tmp_path / "m.gguf")
    problems = verify(tmp_path / "m.gguf").problems
    assert len(problems) == 1
    assert "blk.0.mlp_in.tail.weight: rows after the 88 logical ones are not zero" in problems[0]


def test_padding_of_a_band_that_is_not_zero_is_found(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "llama", intermediate_size=100))
    plan, full = plan_zigzag(checkpoint, {}), torch.randn(256, 256)
    dirty = [
        alone(group.tensors[0], lambda: zigzag.pack(full)) if group.tensors[0].name == "blk.0.mlp_in.weight" else group
        for group in plan.groups
    ]
    dataclasses.replace(plan, groups=tuple(dirty)).write(tmp_path / "m.gguf")
    (problem,) = verify(tmp_path / "m.gguf").problems
    assert "blk.0.mlp_in.weight: rows after the 200 logical ones are not zero" in problem


@pytest.mark.parametrize(
    ("intermediate", "at", "said"),
    [
        (35, -1, "pieces after the last column are not zero"),  # 35 pieces at mlp_mid
        (70, 144, "d or dmin differ within a column of the tail"),  # three pieces a column at mlp_in
    ],
)
def test_a_tail_that_no_engine_runs_is_found(tmp_path: Path, intermediate: int, at: int, said: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "llama", intermediate_size=intermediate, **sizes))
    name = "blk.0.mlp_mid.tail.weight" if intermediate == 35 else "blk.0.mlp_in.tail.weight"

    def spoilt(produce: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        tail, *others = produce()
        tail.view(-1)[at] ^= 0x11
        tail[-1, 12:16] |= 0x11 * (at < 0)  # scales of the piece that is not there
        return [tail, *others]

    plan = plan_zigzag(checkpoint, {})
    dirty = [
        PlannedGroup(group.tensors, partial(spoilt, group.produce)) if group.tensors[0].name == name else group
        for group in plan.groups
    ]
    dataclasses.replace(plan, groups=tuple(dirty)).write(tmp_path / "m.gguf")
    (problem,) = verify(tmp_path / "m.gguf").problems
    assert f"{name}: {said}" in problem


def test_description_of_a_zigzag_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    row = {"layer": 0, "site": "attn_in", "sparsity": 0.5, "threshold": 0.1}
    table = {"allocation": "uniform", "criterion": "magnitude", "sparsity": 0.5, "upstream": "sparse", "rows": [row]}
    write_zigzag(checkpoints["qwen3"], {}, tmp_path / "m.gguf", provenance={"thresholds": table})
    found = json.loads(json.dumps(describe(tmp_path / "m.gguf")))
    assert (found["kind"], found["thresholds"], found["sparse_sites"]) == ("zigzag-q4_k", table, 0)
    assert found["file_bytes"] == (tmp_path / "m.gguf").stat().st_size
    rows = 2 * (512 + 256 + 1536 + 256)
    assert found["bits_per_weight"]["blocks"] == 4.5 + 32 * rows / found["types"]["Q4_K"]["weights"]
    assert found["types"]["Q4_K"]["tensors"] == 8
    assert sum(kind["bytes"] for kind in found["types"].values()) == found["tensor_bytes"]
    assert {p["program"]: p["loads"] for p in found["loads_in"]}["llama.cpp"] is False


def test_description_counts_padding_as_bytes_not_weights(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    found = describe(zigzag_files["odd"])
    assert found["padding_rows"]["blk.0.mlp_in.tail.weight"] == 40
    assert found["bits_per_weight"]["blocks"] > 4.5
    shapes = checkpoints["odd"].source.shapes.values()
    assert found["weights"] == sum(torch.Size(shape).numel() for shape in shapes)
    assert found["sparse_sites"] == 2


def test_description_says_who_loads_a_plain_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    loads = {}
    for family, kind in (("llama", "q4_k"), ("llama", "bf16"), ("qwen3", "q4_k")):
        path = tmp_path / f"{family}.{kind}.gguf"
        write_plain(checkpoints[family], path, type=kind)
        loads[family, kind] = {p["program"]: p["loads"] for p in describe(path)["loads_in"]}
        assert open_checkpoint(path).family is checkpoints[family].family
    assert all(programs["llama.cpp"] and programs["sparsepack"] for programs in loads.values())
    assert loads["llama", "q4_k"]["transformers"] is True


def test_description_of_a_damaged_header_is_an_error(zigzag_files: Files, tmp_path: Path) -> None:
    data = bytearray(zigzag_files["llama"].read_bytes())
    data[500] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ArtifactError, match="header does not match its SHA-256"):
        describe(tmp_path / "m.gguf")


def test_a_tensor_of_two_sites_has_changed_by_no_more_than_at_the_one_where_it_has_more() -> None:
    sites = [{"changes": {"a": 0.2, "b": 0.1}}, {"changes": {"a": 0.1, "b": 0.3}}, {"changes": {}}]
    assert weight_changes({"refit": {"sites": sites}}) == {"a": 0.2, "b": 0.3}
    assert weight_changes({"refit": None}) == {}

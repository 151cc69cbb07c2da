"""Which files of a model are read: those that transformers reads, all parts of a split GGUF, and quantised ones."""

import json
import os
import shutil
from pathlib import Path

import ggml
import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from models_for_tests import make_model
from safetensors.torch import load_file, save_file

from sparsepack.errors import UserError
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint import locate
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import EMBEDDING, HEAD

NORM = "model.norm.weight"


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def other_weights(folder: Path, name: str, factor: float = 3.0) -> None:
    """Other weights of the model in a file of this name."""
    tensors = {each: tensor * factor for each, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / name)


def same(one: Checkpoint, other: Checkpoint) -> bool:
    names = one.source.shapes.keys()
    return names == other.source.shapes.keys() and all(torch.equal(one.tensor(n), other.tensor(n)) for n in names)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", num_hidden_layers=1)


@pytest.mark.parametrize("shards", [True, False])
def test_a_stale_index_does_not_count_beside_the_whole_model(model: Path, capsys, shards: bool) -> None:
    before = open_checkpoint(model)
    if shards:
        other_weights(model, "model-00001-of-00001.safetensors")
    index = dict.fromkeys(before.source.shapes, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same(open_checkpoint(model), before)
    assert "model.safetensors is read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "model.fp16.safetensors", "model-00001-of-00001.safetensors"]
)
def test_other_weights_beside_the_whole_model_are_not_read(model: Path, name: str) -> None:
    before = open_checkpoint(model)
    other_weights(model, name)
    save_file({"lora_A.weight": torch.ones(2, 2)}, model / "adapter_model.safetensors")
    assert same(open_checkpoint(model), before)


def test_shards_without_an_index_are_the_model_and_all_must_be_there(model: Path, tmp_path: Path) -> None:
    before = open_checkpoint(shutil.copytree(model, tmp_path / "before"))
    for name in ("consolidated.safetensors", "model.fp16-00001-of-00002.safetensors"):
        other_weights(model, name)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file({NORM: tensors.pop(NORM)}, model / "model-00002-of-00002.safetensors")
    assert "shard 1 of the model is missing" in refused(model)
    save_file(tensors, model / "model-00001-of-00002.safetensors")
    assert same(open_checkpoint(model), before)


def test_two_models_in_one_folder_are_refused(model: Path) -> None:
    other_weights(model, "b.safetensors")
    (model / "model.safetensors").rename(model / "a.safetensors")
    assert "move the files of the other one away" in refused(model)


def test_a_folder_with_nothing_but_an_adapter_says_what_is_expected(model: Path) -> None:
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    assert "found adapter_model.safetensors; expected model.safetensors" in refused(model)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="whoever is root may read everything")
def test_weights_that_may_not_be_read_are_told_by_that(model: Path) -> None:
    (model / "model.safetensors").chmod(0)
    assert "cannot be read (Permission denied)" in refused(model)


def test_a_link_that_leads_nowhere_is_told_by_that(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("nothing")
    assert "cannot be read (No such file or directory)" in refused(model)


@pytest.mark.parametrize("sharded", [True, False])
def test_from_the_hub_the_weights_are_downloaded_once(model: Path, monkeypatch, sharded: bool) -> None:
    """What transformers reads, and no other file with weights."""
    held = {"config.json", "tokenizer.json", "consolidated.safetensors", "adapter_model.safetensors", "README.md"}
    shard = "model-00001-of-00001.safetensors"
    held |= {shard, "model.safetensors.index.json"} if sharded else {"model.safetensors", "model.fp16.safetensors"}
    downloaded: set[str] = set()

    def download(name: str, revision=None, allow_patterns=(), ignore_patterns=()) -> str:
        from huggingface_hub.utils import filter_repo_objects

        assert revision in (None, model.name)
        found = filter_repo_objects(held, allow_patterns=allow_patterns, ignore_patterns=list(ignore_patterns))
        for file in found:
            downloaded.add(file)
            if file == "model.safetensors.index.json":
                (model / file).write_text(json.dumps({"weight_map": {NORM: shard}}))
        return str(model)

    if sharded:
        (model / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate.located("org/model") == model
    weights = {name for name in downloaded if name.endswith(".safetensors")}
    assert weights == {shard if sharded else "model.safetensors"}


def packed_plain(model: Path, path: Path, format: str = "f32") -> Path:
    FORMATS[format].plan(open_checkpoint(model), PlanRequest()).write(path)
    return path


def rewritten(source: Path, path: Path, change, keys=None, more=None) -> Path:
    """A GGUF with the keys of another one that llama.cpp's programs know, and the tensors that `change` makes of its
    own: name, float32 [...] -> bytes and type; None: left out. `more` are further ones, float32."""
    read = GGUFReader(source)
    writer = GGUFWriter(path, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if not name.startswith(("GGUF.", "sparsepack.", "general.architecture")):
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for name, value in (keys or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.UINT16)
    for tensor in read.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if (made := change(tensor.name, weights.reshape(tensor.shape[::-1]))) is not None:
            writer.add_tensor(tensor.name, made[0], raw_dtype=made[1])
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTISED = [kind.name for kind in gguf.quants._type_traits if kind.name != "BF16"]
"""Every type that gguf-py dequantises; which they are must not depend on its tables alone."""


def test_the_types_of_ggufs_that_are_read_are_these() -> None:
    legacy = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"}
    k_quants = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    i_quants = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
    assert legacy | k_quants | i_quants <= {*QUANTISED}


@pytest.mark.skipif(ggml.library() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", [*QUANTISED, "BF16"])
def test_quantised_ggufs_are_read_as_ggml_decodes_them(model: Path, tmp_path: Path, capsys, kind: str) -> None:
    plain, dtype = packed_plain(model, tmp_path / "m.gguf"), GGMLQuantizationType[kind]
    expected = {}

    def quantised(name: str, weights: np.ndarray):
        if name not in ("blk.0.attn_k.weight", "token_embd.weight", "blk.0.ffn_down.weight"):
            return weights, GGMLQuantizationType.F32
        if kind == "BF16":
            return quantize(weights, dtype), dtype
        if kind.startswith(("IQ1", "IQ2")):  # ggml takes half a minute to make its tables for encoding
            block, nbytes = gguf.GGML_QUANT_SIZES[dtype]
            shape = weights.shape[0], weights.shape[1] // block * nbytes
            blocks = torch.from_numpy(np.random.default_rng(0).integers(0, 60, shape, np.uint8))
        else:
            blocks = ggml.encoded(kind, torch.from_numpy(weights.copy()))
        expected[name] = ggml.decoded(kind, blocks, weights.shape[1]).numpy()
        return blocks.numpy(), dtype

    checkpoint = open_checkpoint(rewritten(plain, tmp_path / "q.gguf", quantised))
    assert (f"weights are quantised already ({kind})" in capsys.readouterr().err) == (kind in QUANTISED)
    as_float = open_checkpoint(
        rewritten(
            plain, tmp_path / "f.gguf", lambda name, weights: (expected.get(name, weights), GGMLQuantizationType.F32)
        )
    )
    for name in checkpoint.source.shapes:  # products of two roundings may come out in another order
        expected_here = as_float.tensor(name).to(checkpoint.source.dtypes[name])
        torch.testing.assert_close(checkpoint.tensor(name), expected_here, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [[0.5], None])
def test_the_scale_beside_a_tensor_counts(model: Path, tmp_path: Path, scale: list[float] | None) -> None:
    """llama.cpp's converter keeps the second scale of NVFP4 in a tensor of its own."""
    plain, dtype = packed_plain(model, tmp_path / "m.gguf"), GGMLQuantizationType.NVFP4
    name, blocks = "blk.0.ffn_up.weight", {}

    def quantised(each: str, weights: np.ndarray):
        if each != name:
            return weights, GGMLQuantizationType.F32
        blocks[each] = np.random.default_rng(0).integers(
            0, 100, (weights.shape[0], weights.shape[1] // 64 * 36), np.uint8
        )
        return blocks[each], dtype

    beside = (
        {} if scale is None else {name.replace("weight", "scale"): scale, name.replace("weight", "input_scale"): [3.0]}
    )
    path = rewritten(plain, tmp_path / "q.gguf", quantised, more=beside)
    found = open_checkpoint(path).tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(found, torch.from_numpy(dequantize(blocks[name], dtype)) * (1 if scale is None else scale[0]))


def same_values(one: Checkpoint, other: Checkpoint) -> bool:
    return all(torch.equal(one.tensor(n).float(), other.tensor(n).float()) for n in other.source.shapes)


def test_a_vector_of_blocks_is_read(model: Path, tmp_path: Path) -> None:
    plain, dtype = packed_plain(model, tmp_path / "m.gguf"), GGMLQuantizationType.Q4_K
    blocks = np.random.default_rng(0).integers(0, 60, 144, np.uint8)

    def quantised(name: str, weights: np.ndarray):
        return (blocks, dtype) if name == "output_norm.weight" else (weights, GGMLQuantizationType.F32)

    checkpoint = open_checkpoint(rewritten(plain, tmp_path / "q.gguf", quantised))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.from_numpy(dequantize(blocks, dtype)))


def test_a_type_that_gguf_py_does_not_know_is_named(model: Path, tmp_path: Path) -> None:
    def quantised(name: str, weights: np.ndarray):
        if name != "token_embd.weight":
            return weights, GGMLQuantizationType.F32
        return np.zeros((512, 256 // 256 * 292), np.uint8), GGMLQuantizationType.Q8_K

    path = rewritten(packed_plain(model, tmp_path / "m.gguf"), tmp_path / "q.gguf", quantised)
    assert "token_embd.weight is Q8_K, which gguf-py does not dequantise" in refused(path)


@pytest.mark.parametrize("head", ["absent", "equal", "different", "alone"])
def test_the_tensors_of_a_gguf_tell_whether_the_embedding_is_the_output_matrix(
    model: Path, tmp_path: Path, head
) -> None:
    plain = packed_plain(model, tmp_path / "m.gguf")
    embedding = {tensor.name: tensor.data for tensor in GGUFReader(plain).tensors}["token_embd.weight"]

    def change(name: str, weights: np.ndarray):
        if (name, head) in (("output.weight", "absent"), ("token_embd.weight", "alone")):
            return None
        if name == "output.weight" and head == "equal":
            weights = embedding
        return quantize(weights, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0

    checkpoint = open_checkpoint(rewritten(plain, tmp_path / "q.gguf", lambda *each: norms_as_they_are(change, *each)))
    assert checkpoint.tied == (head != "different")
    assert torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)) == checkpoint.tied


def norms_as_they_are(change, name: str, weights: np.ndarray):
    return change(name, weights) if weights.ndim > 1 else (weights, GGMLQuantizationType.F32)


@pytest.fixture
def parts(model: Path, tmp_path: Path) -> list[Path]:
    """A GGUF in two parts."""
    plain = packed_plain(model, tmp_path / "m.gguf")
    names = [tensor.name for tensor in GGUFReader(plain).tensors]

    def part(number: int) -> Path:
        def change(name: str, weights: np.ndarray):
            return (weights, GGMLQuantizationType.F32) if names.index(name) % 2 == number else None

        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        return rewritten(plain, path, change, {"split.no": number, "split.count": 2})

    return [part(0), part(1)]


def test_a_split_gguf_is_read_whole(model: Path, parts: list[Path]) -> None:
    checkpoint = open_checkpoint(parts[0])
    assert same_values(checkpoint, open_checkpoint(model))
    before = checkpoint.sha256
    by_another = open_checkpoint(parts[1])
    assert same_values(by_another, checkpoint)
    assert by_another.sha256 == before
    parts[1].write_bytes(parts[1].read_bytes()[:-4] + b"\0\0\0\x40")
    assert open_checkpoint(parts[0]).sha256 != before


def test_a_split_gguf_that_is_not_whole_is_told_by_its_parts(parts: list[Path], tmp_path: Path) -> None:
    first, second = parts
    renamed = first.rename(tmp_path / "whole.gguf")
    assert "one part of a GGUF that is split into 2" in refused(renamed)
    renamed.rename(first)
    content = second.read_bytes()
    second.unlink()
    assert "part 2 of 2 is missing; expected m-00002-of-00002.gguf beside it" in refused(first)
    second.write_bytes(content)
    first.rename(tmp_path / "elsewhere")
    assert "part 1 of 2 is missing; expected m-00001-of-00002.gguf beside it" in refused(second)
    (tmp_path / "elsewhere").rename(first)
    second.write_bytes(first.read_bytes())
    assert "not part 2 of 2 by its own keys" in refused(first)
    second.write_bytes(content[:-100])
    assert "truncated" in refused(first)

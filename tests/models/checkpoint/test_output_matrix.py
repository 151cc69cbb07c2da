"""Whether the output matrix is the embedding: the tensors decide, and what is written says the same."""

import json

import pytest
import torch
from models_for_tests import make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.writer import texts_of, write_checkpoint
from sparsepack.models.family import EMBEDDING, HEAD
from sparsepack.models.hf_model.model import load_model
from sparsepack.packing import PackRequest

IDS = torch.arange(24).reshape(2, 12)


def stored(folder, head, tied):
    """A checkpoint whose output matrix is stored as `head` says, beside a configuration that has `tied`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if head == "alone":
        tensors[HEAD] = tensors.pop(EMBEDDING)
    elif head == "absent":
        tensors.pop(HEAD, None)
    else:
        tensors[HEAD] = tensors[EMBEDDING].clone() if head == "equal" else tensors[EMBEDDING].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["alone", "absent", "equal", "different"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_tensors_decide_and_every_written_folder_says_so(tmp_path, capsys, family, head, tied):
    folder = stored(make_model(tmp_path / "m", family, num_hidden_layers=1), head, tied)
    tensors = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tied == (head != "different")
    assert (HEAD in checkpoint.source.shapes) == (head == "different")
    assert torch.equal(checkpoint.tensor(HEAD), tensors[HEAD if HEAD in tensors else EMBEDDING])
    assert torch.equal(checkpoint.tensor(EMBEDDING), tensors[EMBEDDING if EMBEDDING in tensors else HEAD])
    assert ("the tensors count" in capsys.readouterr().err) == (checkpoint.tied != tied)

    write_checkpoint(checkpoint, texts_of(checkpoint), {}, tmp_path / "again", False)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(stock(IDS).logits, load_model(checkpoint)(IDS).logits)


def test_a_configuration_that_agrees_is_written_as_it_is(tmp_path):
    folder = make_model(tmp_path / "m")
    assert texts_of(open_checkpoint(folder))["config.json"] == (folder / "config.json").read_text()


@pytest.mark.parametrize("format", ["zigzag-q4_k", "f16", "slide-bf16"])
def test_a_head_that_differs_is_packed_and_verified(tmp_path, format):
    folder = stored(make_model(tmp_path / "m"), "different", True)
    if format == "slide-bf16":
        sparsepack.prune(folder, tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
        folder = tmp_path / "pruned"
    output = sparsepack.pack(PackRequest(str(folder), tmp_path / f"p{FORMATS[format].suffix}", format=format)).path
    report = verify(output, folder)
    assert report.passed, report.problems
    assert any(tensor.name in ("output.weight", HEAD) for tensor in report.tensors)


@pytest.mark.parametrize("format", ["zigzag-q4_k", "f16"])
def test_verify_compares_the_output_matrix_of_a_tied_artifact(tmp_path, format):
    """An artifact that was packed as tied has lost an output matrix of its own."""
    folder = stored(make_model(tmp_path / "m"), "absent", True)
    output = tmp_path / "packed.gguf"
    FORMATS[format].plan(open_checkpoint(folder), PlanRequest()).write(output)
    assert verify(output, folder).passed
    stored(folder, "different", True)
    report = verify(output, folder)
    assert any("output matrix" in problem for problem in report.problems)

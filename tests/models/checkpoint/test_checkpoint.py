"""Opening a checkpoint: what is read, and every way in which it can be refused."""

import json
import shutil

import pytest
import torch
from models_for_tests import VOCABULARY, edit_config, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import EMBEDDING, HEAD, SITES
from sparsepack.models.hf_model.model import load_model

IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture
def copied(folders, tmp_path):
    """A copy of a random checkpoint that a test may damage."""

    def copy(name="llama"):
        return shutil.copytree(folders(name), tmp_path / "model")

    return copy


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(name) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["llama, biases", "llama, tied, llama3 rotary", "mistral, sliding window", "qwen2", "qwen3, tied, wide heads"],
)
def test_the_whole_model_is_the_stock_one(folders, name):
    stock = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32).eval()
    mine = load_model(open_checkpoint(folders(name)))
    with torch.inference_mode():
        assert torch.equal(mine(IDS).logits, stock(IDS).logits)
    assert not any(parameter.requires_grad for parameter in mine.parameters())


def test_shards_are_one_model(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded, whole = open_checkpoint(tmp_path), open_checkpoint(folders("llama"))
    assert dict(sharded.source.shapes) == dict(whole.source.shapes)
    assert all(torch.equal(sharded.tensor(name), whole.tensor(name)) for name in whole.source.shapes)

    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    moved = shard.rename(tmp_path / "elsewhere")
    assert f"the shard {shard.name}" in refused(tmp_path)
    shard.write_bytes(moved.read_bytes()[:-1000])
    assert f"{shard}: cannot be read" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "not a shard index" in refused(tmp_path)


def test_a_site_stacks_its_projections_and_their_biases(folders):
    checkpoint = open_checkpoint(folders("qwen2"))
    tensors = load_file(folders("qwen2") / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    weight, bias = checkpoint.stacked(1, "attn_in")
    assert torch.equal(weight, torch.cat([tensors[f"{prefix}{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(bias, torch.cat([tensors[f"{prefix}{p}_proj.bias"] for p in "qkv"]))
    assert checkpoint.stacked(1, "attn_out")[1] is None
    for site in SITES:
        assert checkpoint.stacked_shape(site) == tuple(checkpoint.stacked(0, site)[0].shape)


def test_a_tied_head_is_the_embedding_and_never_a_tensor_of_its_own(folders):
    checkpoint = open_checkpoint(folders("qwen3, tied, wide heads"))
    assert checkpoint.tied
    assert HEAD not in checkpoint.source.shapes
    assert torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))
    model = load_model(checkpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_hash_is_of_the_weights(folders, copied):
    folder = copied()
    before = open_checkpoint(folders("llama")).sha256
    assert open_checkpoint(folder).sha256 == before
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert open_checkpoint(folder).sha256 != before


def test_an_unknown_tensor_is_named(copied):
    folder = copied()
    extra = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(3), "model.layers.1.x": torch.zeros(3)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    message = refused(folder)
    assert "model.layers.1.mlp.experts.0.up_proj.weight is not understood in a llama model" in message
    assert "(2 such tensors)" in message


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_blocks_behind_those_that_the_configuration_means_are_not_those_of_its_model(tmp_path, family):
    folder = make_model(tmp_path / "m", family)
    edit_config(folder, num_hidden_layers=1)
    message = refused(folder)
    assert (
        "model.layers.1.input_layernorm.weight is there, its configuration means 1 block (num_hidden_layers)" in message
    )
    assert message.endswith("; weights and config.json do not belong together")


def test_biases_that_the_configuration_does_not_know_are_refused_not_dropped(copied):
    """transformers would load this model, and leave the biases out."""
    folder = copied("llama, biases")
    edit_config(folder, attention_bias=False)
    assert "model.layers.0.self_attn.k_proj.bias is not understood" in refused(folder)


def test_a_missing_tensor_is_named(copied):
    folder = copied("qwen2")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    assert "the tensor model.layers.1.self_attn.k_proj.bias is missing (1 in all), which its conf" in refused(folder)
    edit_tensors(folder, lambda tensors: [tensors.pop(EMBEDDING), tensors.pop(HEAD)])
    assert "(2 in all)" in refused(folder)


def test_a_tensor_of_another_shape_is_named(copied):
    folder = copied()
    edit_config(folder, intermediate_size=384)
    message = refused(folder)
    assert "mlp.gate_proj.weight is [512, 256], its configuration means [384, 256]" in message


def test_rotary_frequencies_of_old_exports_are_no_obstacle(copied):
    from sparsepack.models.hf_model.blocks import BlockStream

    folder = copied()
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(32) for n in range(2)}
    edit_tensors(folder, lambda tensors: tensors.update(frequencies))
    stream = BlockStream(open_checkpoint(folder))
    stream.load(1)
    assert stream.block.mlp.down_proj.weight.shape == (256, 512)


def test_an_unknown_tensor_name_gives_the_nearest(folders):
    with pytest.raises(CheckpointError, match=r"nearest: model\.norm\.weight"):
        open_checkpoint(folders("llama")).tensor("model.norm.weights")


@pytest.mark.parametrize(("model_type", "hint"), [("qwen2_x", "nearest: qwen2"), ("t5", "expected one of llama")])
def test_another_model_type_is_named_with_the_known_ones(copied, model_type, hint):
    folder = copied()
    edit_config(folder, model_type=model_type)
    message = refused(folder)
    assert repr(model_type) in message
    assert hint in message
    assert all(family in message for family in FAMILIES)


def test_a_granite_4_with_experts_is_refused(tmp_path):
    folder = make_model(tmp_path / "m", "granitemoehybrid")
    edit_config(folder, num_local_experts=4)
    with pytest.raises(CheckpointError, match="num_local_experts is 4; expected 0"):
        open_checkpoint(folder)


def test_releases_call_layers_with_a_state_mamba(tmp_path):
    kinds = ["mamba", "attention"]
    folder = make_model(tmp_path / "m", "granitemoehybrid", mamba_n_heads=4, mamba_d_state=16, layer_types=kinds)
    edit_config(folder, layer_types=kinds)
    architecture = open_checkpoint(folder).architecture
    assert (architecture.mamba_layers, architecture.attention_layers) == ((0,), (1,))


def test_packed_folders_are_refused(copied):
    folder = copied()
    edit_config(folder, quantization_config={"quant_method": "sparsepack", "format": "any"})
    assert "a packed model without sparsepack.json" in refused(folder)
    (folder / "sparsepack.json").touch()
    assert "a packed sparsepack artifact; expected its source model here" in refused(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"hidden_size": 3}', '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_config_that_is_none_is_one_line(copied, content):
    folder = copied()
    (folder / "config.json").write_text(content)
    assert f"{folder / 'config.json'}: not a" in refused(folder)


def test_pickled_weights_are_refused_unread(copied):
    folder = copied()
    (folder / "model.safetensors").unlink()
    assert "no .safetensors file of a model; found none" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    message = refused(folder)
    assert "pickled weights" in message
    assert "write it with save_pretrained" in message


def test_truncated_weights_are_refused(copied):
    path = copied() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "is it whole?" in refused(path.parent)


def test_what_is_no_model_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no config.json" in refused(tmp_path)
    assert "no such model folder" in refused(tmp_path / "none")
    (tmp_path / "weights.pth").write_bytes(b"x")
    assert "expected a model folder, a .gguf file or a hub id" in refused(tmp_path / "weights.pth")
    for hub_id in ("no-such-org/no-such-model", "no-such-model"):
        assert "neither a local model folder nor a hub model" in refused(hub_id)


def test_a_tokenizer_that_does_not_fit_is_refused(copied, tmp_path):
    folder = copied()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    one_more = {"id": VOCABULARY, "content": "<one more>", "special": False}
    vocabulary["added_tokens"].append({**vocabulary["added_tokens"][0], **one_more})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(CheckpointError, match=f"{VOCABULARY + 1} tokens, the model {VOCABULARY}"):
        _ = open_checkpoint(folder).tokenizer


def test_a_tokenizer_that_is_missing_is_one_line(copied):
    folder = copied()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    expected = r"its tokenizer cannot be loaded \(.*\); expected .* as tokenizer\.json in the folder of the weights$"
    with pytest.raises(CheckpointError, match=expected) as caught:
        _ = open_checkpoint(folder).tokenizer
    assert "\n" not in str(caught.value)


def test_opening_reads_no_weights(folders, monkeypatch):
    from sparsepack.models.checkpoint.safetensors_source import SafetensorsSource
    from sparsepack.models.checkpoint.source_hash import SourceHash

    monkeypatch.setattr(SafetensorsSource, "tensor", lambda *_: pytest.fail("read a tensor"))
    monkeypatch.setattr(SourceHash, "meanwhile", lambda *_: pytest.fail("hashed the weights"))
    assert open_checkpoint(folders("llama")).layers == 2


def test_the_shipped_model_opens_by_name():
    checkpoint = open_checkpoint("shipped:tiny")
    assert checkpoint.family is FAMILIES["llama"]
    assert len(checkpoint.tokenizer) <= checkpoint.config.vocab_size


def test_random_models_differ_in_every_tensor(tmp_path, folders):
    """What the tests above rely on: no tensor is constant, so a lost or swapped one shows."""
    other = open_checkpoint(make_model(tmp_path / "other", "llama", seed=1))
    checkpoint = open_checkpoint(folders("llama"))
    assert not any(torch.equal(checkpoint.tensor(name), other.tensor(name)) for name in checkpoint.source.shapes)

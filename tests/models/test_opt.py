"""OPT, which has no gate, no rotary embedding and names of its own: read block by block, it is the stock model."""

import json
import shutil

import pytest
import torch
from models_for_tests import END, OPT, TEXT, VOCABULARY, edit_config, make_model, make_opt, tokenizer
from passes import by_a_stream, by_the_stock_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.errors import CheckpointError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.families import taken_by
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.tokenizer.windows import rolling_windows

IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def opts(tmp_path_factory):
    return {name: make_opt(tmp_path_factory.mktemp("opt") / "m", **changes) for name, changes in OPT.items()}


@pytest.fixture
def copied(opts, tmp_path):
    return shutil.copytree(opts["opt"], tmp_path / "model")


def stock_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def refused(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])
@pytest.mark.parametrize("name", OPT)
@torch.inference_mode()
def test_embedding_blocks_and_what_comes_after_are_those_of_the_stock_model_bit_for_bit(opts, name, watched):
    stock = stock_model(opts[name])
    expected, last = by_the_stock_model(stock, stock.model.decoder.layers, IDS)
    checkpoint = open_checkpoint(opts[name])
    stream = BlockStream(checkpoint)
    found, seen = by_a_stream(stream, checkpoint.layers, IDS, watched)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(stream.finish(found[-1]), last)
    assert torch.equal(stream.head().float(), stock.lm_head.weight)
    heads, hidden_size = stock.config.num_attention_heads, stock.config.hidden_size
    assert seen == [((2, heads, 33, hidden_size // heads),) * 2] * (checkpoint.layers if watched else 0)


@pytest.mark.parametrize("name", OPT)
def test_the_whole_model_is_the_stock_one(opts, name):
    mine, stock = load_model(open_checkpoint(opts[name])), stock_model(opts[name])
    with torch.inference_mode():
        assert torch.equal(mine(IDS).logits, stock(IDS).logits)
    assert (mine.lm_head.weight is mine.model.decoder.embed_tokens.weight) == stock.config.tie_word_embeddings


def test_watched_queries_are_scaled_as_those_of_other_families(opts):
    """The products over sqrt(D), softmax and values make the attention's own output, though OPT scales before."""
    stream, seen, values, outputs = BlockStream(open_checkpoint(opts["opt"])), [], [], []
    stream.load(0)
    attention = stream.block.self_attn
    attention.v_proj.register_forward_hook(lambda _, __, output: values.append(output))
    attention.out_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    with torch.inference_mode(), stream.watched(lambda query, key, _: seen.append((query, key))):
        stream(stream.embed(IDS))
    (query, key), value = seen[0], values[0].unflatten(-1, (4, 32)).transpose(1, 2)
    scores = (query @ key.transpose(-1, -2) / 32**0.5).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
    torch.testing.assert_close((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), outputs[0])


@pytest.mark.parametrize("name", ["opt", "opt, odd sizes"])
def test_sites_show_rows_and_positions_apart_and_take_what_is_put_there(opts, name):
    """The stock block joins them before its MLP."""
    checkpoint, seen, read = open_checkpoint(opts[name]), {}, []
    model = load_model(checkpoint)
    block = model.model.decoder.layers[1]
    block.fc2.register_forward_hook(lambda _, inputs, __: read.append(inputs[0]))

    def halved(layer, site, x):
        seen[layer, site] = tuple(x.shape)
        return x.mT.contiguous().mT / 2 if site == "mlp_mid" else None

    with torch.inference_mode():
        model(IDS)
        with site_hooks([(1, block)], checkpoint.family, halved):
            model(IDS)
    assert seen == {(1, site): (2, 33, checkpoint.stacked_shape(site, 1)[1]) for site in SITES}
    torch.testing.assert_close(read[1], read[0] / 2)


def test_shards_are_one_model_and_so_is_an_export_of_the_base_model_alone(opts, copied, tmp_path):
    whole = open_checkpoint(opts["opt"])
    stock_model(opts["opt"]).to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    tensors = load_file(copied / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    assert "decoder.layers.0.fc1.weight" in bare
    save_file(bare, copied / "model.safetensors", metadata={"format": "pt"})
    for folder in (tmp_path / "shards", copied):
        found = open_checkpoint(folder)
        assert dict(found.source.shapes) == dict(whole.source.shapes)
        assert all(torch.equal(found.tensor(name), whole.tensor(name)) for name in whole.source.shapes)
    twice = tensors | {"decoder.layers.0.fc1.bias": torch.zeros(256)}
    save_file(twice, copied / "model.safetensors", metadata={"format": "pt"})
    assert "the tensor model.decoder.layers.0.fc1.bias stands in model.safetensors too" in refused(copied)


def test_its_tokenizer_is_read_from_vocabulary_and_merges_and_texts_begin_with_its_bos(copied, tmp_path):
    """As the published models have it, without a tokenizer.json."""
    model = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "tokenizer.json").unlink()
    model["vocab"]["</s>"] = model["vocab"].pop(END)
    (copied / "vocab.json").write_text(json.dumps(model["vocab"]))
    (copied / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    (copied / "tokenizer_config.json").write_text(json.dumps(config | special))
    checkpoint, text = open_checkpoint(copied), Text("topics", (TEXT[:3000],), "topics")
    inputs, targets = rolling_windows(checkpoint.tokenizer, text, 32)
    assert inputs[:, 0].unique().tolist() == [model["vocab"]["</s>"]]
    assert targets.flatten()[:90].tolist() == tokenizer()(TEXT[:3000])["input_ids"][:90]
    prune(checkpoint, tmp_path / "p", PruneOptions(keep=2, of=4, method="magnitude"))
    again = open_checkpoint(tmp_path / "p").tokenizer
    assert torch.equal(rolling_windows(again, text, 32)[0], inputs)


def test_a_site_stacks_its_projections_and_their_biases(opts):
    checkpoint = open_checkpoint(opts["opt, odd sizes"])
    tensors = load_file(opts["opt, odd sizes"] / "model.safetensors")
    weight, bias = checkpoint.stacked(2, "mlp_in")
    assert torch.equal(weight, tensors["model.decoder.layers.2.fc1.weight"])
    assert torch.equal(bias, tensors["model.decoder.layers.2.fc1.bias"])
    assert [checkpoint.stacked_shape(site) for site in SITES] == [(270, 90), (90, 90), (203, 90), (90, 203)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn_dim": 0}, "ffn_dim is 0; expected a whole number from 1"),
        ({"ffn_dim": 300}, "config.json do not belong together"),
        ({"num_hidden_layers": 2}, "its configuration means 2 blocks (num_hidden_layers), of which the first one is 0"),
        ({"num_attention_heads": 3}, "embed_dim must be divisible by num_heads"),
        ({"word_embed_proj_dim": 64}, "the tensor model.decoder.project_in.weight is missing (2 in all)"),
        ({"do_layer_norm_before": False}, "final_layer_norm.bias is not understood in a opt model"),
        ({"activation_function": "fatrelu"}, "activation 'fatrelu' is not one of transformers' own"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_its_own_names(copied, changes, said):
    edit_config(copied, **changes)
    assert said in refused(copied)


def test_what_an_engine_would_need_is_refused_and_named(opts):
    with pytest.raises(CheckpointError, match=r"no format holds and no engine runs opt models \(learned pos") as caught:
        _ = open_checkpoint(opts["opt"]).architecture
    assert f"expected one of {', '.join(taken_by('pack'))}; calibrate, trace" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "fatrelu"}, "activation 'fatrelu' is not one of transformers' own, and code that comes with"),
        ({"model_type": "sparsellama"}, "model type 'sparsellama' is not supported (nearest: llama); expected one of"),
    ],
)
def test_relu_models_with_code_of_their_own_are_refused_before_any_of_it_is_read(tmp_path, changes, said):
    folder = make_model(tmp_path / "m", "llama", hidden_act="relu")
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, auto_map=code, **changes)
    assert said in refused(folder)

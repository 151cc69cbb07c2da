"""Block by block is the stock model, and holds one block."""

import weakref

import pytest
import torch
from model_variants import FOLDERS
from models_for_tests import VOCABULARY
from passes import by_a_stream, by_the_stock_model
from transformers import AutoModelForCausalLM

from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.blocks import BlockStream

IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])
@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_every_block_gives_what_the_stock_model_gives(folders, name, watched):
    """Exactly, on a text longer than the sliding window; watching the attention changes nothing."""
    folder = folders(name)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    expected, _ = by_the_stock_model(stock, stock.model.layers, IDS)
    checkpoint = open_checkpoint(folder)
    found, seen = by_a_stream(BlockStream(checkpoint), checkpoint.layers, IDS, watched)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert len(expected) == checkpoint.layers
    if watched:
        config = stock.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query = (2, config.num_attention_heads, 33, head)
        assert seen == [(query, (2, config.num_key_value_heads, 33, head))] * checkpoint.layers


def test_the_sliding_window_matters_to_these_tests(folders):
    """Otherwise the test above would not notice its loss."""
    folder = folders("mistral, sliding window")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=None)
    assert (model(IDS).logits - wide(IDS).logits).abs().max() > 0.1


def test_watched_queries_and_keys_are_those_after_norms_and_rotation(folders):
    """Their products, softmax and values make the attention's own output."""
    checkpoint = open_checkpoint(folders("qwen3, tied, wide heads"))
    stream, seen, values, outputs = BlockStream(checkpoint), [], [], []
    stream.load(0)
    attention = stream.block.self_attn
    attention.v_proj.register_forward_hook(lambda _, __, output: values.append(output))
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    with torch.inference_mode(), stream.watched(lambda query, key, _: seen.append((query, key))):
        stream(stream.embed(IDS))
    (query, key), value = seen[0], values[0].unflatten(-1, (2, 128)).transpose(1, 2)
    key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2) / 128**0.5).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
    mine = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mine, outputs[0], rtol=1e-4, atol=1e-5)


def test_watching_ends_with_its_context(folders):
    stream, seen = BlockStream(open_checkpoint(folders("llama"))), []
    stream.load(0)
    with torch.inference_mode():
        with stream.watched(lambda *shown: seen.append(shown)):
            stream(stream.embed(IDS))
        stream(stream.embed(IDS))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2, every second layer slides"])
def test_no_more_than_two_blocks_are_ever_held(folders, monkeypatch, name):
    """While a block is read ahead, the one before that in use is gone already, of whatever kind, and of the one in
    use there is nothing but what it computes with."""
    checkpoint = open_checkpoint(folders(name))
    source, before, as_stored = type(checkpoint.source), [], []
    tensor = source.tensor

    def watched(self, name):
        if self is not checkpoint.source:  # of another test's stream, which reads ahead still
            return tensor(self, name)
        assert not [ref for refs in before[:-1] for ref in refs if ref() is not None], "an older block is still held"
        block = name.split(".")[2]
        held = [of for of, ref in as_stored if of != block and ref() is not None]
        assert not held, "another block is still held as it is stored"
        value = tensor(self, name)
        as_stored.append((block, weakref.ref(value)))
        return value

    monkeypatch.setattr(source, "tensor", watched)
    stream = BlockStream(checkpoint)
    for layer in [*range(checkpoint.layers), 0]:
        stream.load(layer)
        before.append([weakref.ref(parameter) for parameter in stream.block.parameters()])
        assert len(before[-1]) >= 9
    assert as_stored


def read_names(checkpoint, monkeypatch):
    """The names of tensors that are read of this checkpoint from now on; another test's may still be read ahead."""
    names, tensor = [], type(checkpoint.source).tensor

    def noted(self, name):
        if self is checkpoint.source:
            names.append(name)
        return tensor(self, name)

    monkeypatch.setattr(type(checkpoint.source), "tensor", noted)
    return names


def test_a_block_reads_its_own_tensors_only(folders, monkeypatch):
    checkpoint = open_checkpoint(folders("llama"))
    read = read_names(checkpoint, monkeypatch)
    stream = BlockStream(checkpoint)
    assert read == []
    stream.load(checkpoint.layers - 1)
    assert len(read) == 9
    assert all(name.startswith(f"model.layers.{checkpoint.layers - 1}.") for name in read)


def test_the_block_after_the_one_in_use_is_read_and_no_other(folders, monkeypatch):
    checkpoint = open_checkpoint(folders("llama"))
    read = read_names(checkpoint, monkeypatch)
    stream = BlockStream(checkpoint)
    for layer in range(checkpoint.layers):
        stream.load(layer)
        stream.ahead.wait()  # else what is read is a matter of time
        blocks = [name.removeprefix("model.layers.").partition(".")[0] for name in read]
        assert sorted(set(blocks)) == [str(n) for n in range(min(layer + 2, checkpoint.layers))]
        assert len(blocks) == 9 * min(layer + 2, checkpoint.layers)


def test_blocks_run_in_the_precision_asked_for(folders):
    stream = BlockStream(open_checkpoint(folders("llama")), dtype=torch.bfloat16)
    stream.load(0)
    hidden = stream.embed(IDS)
    assert hidden.dtype == stream(hidden).dtype == torch.bfloat16
    assert {p.dtype for p in stream.block.parameters()} == {torch.bfloat16}

"""What the tests of evaluation share: a byte-level tokenizer, a tiny random Llama and a dense scorer over it; and the
shipped tiny model at half sparsity."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack

CONTEXT = 48


class PlainScorer:
    """A transformers model, dense everywhere; remembers what it was asked."""

    device = torch.device("cpu")

    def __init__(self, model, context=CONTEXT):
        self.model, self.context, self.calls = model, context, []

    def logits(self, input_ids, lengths, sparse_from, scored_from=None):
        assert input_ids.shape[1] <= self.context
        self.calls.append((input_ids, lengths, sparse_from))
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return self.model(input_ids, attention_mask=mask.long()).logits


@pytest.fixture(scope="session")
def byte_tokenizer():
    specials = ["<s>", "</s>", "<|turn|>"]
    vocabulary = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def scorer(tiny_llama):
    return PlainScorer(tiny_llama)


@pytest.fixture(scope="session")
def plain_scorer():
    """The class itself, for tests that bring their own model or context."""
    return PlainScorer


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with thresholds of the tiny model for half of its weights, t.json, its zigzag artifact, m.gguf, and
    thresholds for the MLPs alone, mlp.json."""
    folder = tmp_path_factory.mktemp("half")
    checkpoint = open_checkpoint("shipped:tiny")
    options = CalibrateOptions(context=64, samples=8, batch=8)
    calibration = calibrate(checkpoint, read_text("shipped:train"), folder / "c", options)
    find_thresholds(checkpoint, calibration, AllocationOptions(0.5)).write(folder / "t.json")
    mlp = AllocationOptions(0.5, include=("*.mlp_*",))
    find_thresholds(checkpoint, calibration, mlp).write(folder / "mlp.json")
    pack(PackRequest("shipped:tiny", folder / "m.gguf", thresholds=folder / "t.json"))
    return folder

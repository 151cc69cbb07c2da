"""Gemma 2 and 3: soft caps, norms after attention and MLP, a scaled embedding, two kinds of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import VOCABULARY, make_model
from passes import by_a_stream, by_the_stock_model
from transformers import AutoModelForCausalLM

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.eval.scorer import SparseScorer, StreamedScorer
from sparsepack.formats.llama_cpp.keys import architecture_keys
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.rotated import Bases, rotated
from sparsepack.models.hf_config import architecture_of
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.model import load_model

IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))
NAMES = {
    "gemma2": {"family": "gemma2", "sliding_window": 7, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 100},
    "gemma3": {"family": "gemma3_text", "sliding_window": 7, "final_logit_softcapping": 3.0},
}
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Any] = NAMES
    return {name: make_model(tmp_path_factory.mktemp(name) / "m", **changes) for name, changes in made.items()}


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])
@every_name
@torch.inference_mode()
def test_every_block_gives_what_the_stock_model_gives(folders: dict[str, Path], name: str, watched: bool) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    expected, last = by_the_stock_model(stock, stock.model.layers, IDS)
    checkpoint = open_checkpoint(folders[name])
    stream = BlockStream(checkpoint)
    found, seen = by_a_stream(stream, checkpoint.layers, IDS, watched)
    exact = 1e-5 if watched else 1e-6  # watched, soft-capped attention is ours
    for ours, theirs in zip([*found, stream.finish(found[-1])], [*expected, last], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < exact
    assert len(seen) == (checkpoint.layers if watched else 0)


@every_name
@torch.inference_mode()
def test_scorers_give_capped_logits(folders: dict[str, Path], name: str) -> None:
    checkpoint = open_checkpoint(folders[name])
    expected = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()(IDS).logits
    assert float(expected.abs().max()) <= 3
    dense = torch.tensor([33, 33])
    model = load_model(checkpoint)
    for scorer in (SparseScorer(model, checkpoint.family, {}, 64), StreamedScorer(checkpoint, {}, 64)):
        found = scorer.head(slice(None))(scorer.hidden(IDS, None, dense))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@every_name
def test_they_cannot_be_rotated(folders: dict[str, Path], name: str) -> None:
    checkpoint = open_checkpoint(folders[name])
    with pytest.raises(CheckpointError, match=r"models cannot be rotated \(norms stand between its matrices"):
        rotated(checkpoint, Bases())


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gemma2", {"tie_word_embeddings": False}, "an output matrix beside the embedding: llama.cpp reads none"),
        (
            "gemma2",
            {"query_pre_attn_scalar": 100},
            "attention scores times 0.1: llama.cpp takes 0.125 in gemma2 models",
        ),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "gives one to all but one in 2"),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, "soft caps: llama.cpp has none in gemma3 models"),
        ("gemma2", {"hidden_activation": "silu"}, "llama.cpp runs gemma2 models with gelu_pytorch_tanh only"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], what: str
) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", family, **changes))
    with pytest.raises(PackingError, match=what):
        architecture_keys(architecture_of(checkpoint.config, None), checkpoint.config)


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "gemma2"))
    checkpoint.config.use_bidirectional_attention = True
    with pytest.raises(CheckpointError, match="gemma2: tokens see later ones"):
        architecture_of(checkpoint.config, None)

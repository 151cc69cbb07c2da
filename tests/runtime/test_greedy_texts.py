"""Long greedy texts are those that transformers generates, in every family that computes something of its own."""

from functools import cache
from typing import Any

import pytest
import torch
from backends import engine_of, every_backend_that
from model_table import DELTA_MIXTURE, LATENTS, LFM2_MOE, NEMOTRON_H
from packed_models import random_model, stock_model
from rounding import check_logits
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import TRAITS
from sparsepack.runtime.engine import Engine

IDS = torch.randint(300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
TOKENS = 256
ALIKE = 248
"""Of so many tokens backends that round choose this many alike at least."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3, sliding window", {"sliding_window": 60, "max_position_embeddings": 300}),
    "longrope": (
        "phi3, a part of each head, longrope",
        {"max_position_embeddings": 300, "original_max_position_embeddings": 75},
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 75,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "gemma2": ("gemma2, soft caps", {"sliding_window": 60, "max_position_embeddings": 300}),
    "gpt-oss": (
        "gpt_oss, sinks",
        {"sliding_window": 60, "max_position_embeddings": 300},
    ),
    "exaone4": ("exaone4, only layers with a window turn", {"sliding_window": 60, "max_position_embeddings": 300}),
    "states": ("qwen3.5, states", {"max_position_embeddings": 300}),
    "lfm2": ("lfm2, short convolutions", {"max_position_embeddings": 300}),
    "lfm2_moe": ("llama", {**LFM2_MOE, "max_position_embeddings": 300}),
    "qwen3_next": (
        "llama",
        {**DELTA_MIXTURE, "model_type": "qwen3_next", "num_experts_per_tok": 6, "max_position_embeddings": 300},
    ),
    "nemotron_h": ("llama", {**NEMOTRON_H, "num_experts_per_tok": 6, "max_position_embeddings": 300}),
    "gemma4": ("gemma4, keys for values", {"sliding_window": 60, "max_position_embeddings": 300}),
    "gemma4, experts": (
        "gemma4, a dense MLP beside experts",
        {"sliding_window": 60, "max_position_embeddings": 300},
    ),
    "gemma4, inputs of each layer": (
        "gemma4, inputs of each layer, shared keys and values",
        {"sliding_window": 60, "max_position_embeddings": 300},
    ),
    "latents": (
        "llama",
        {"model_type": "glm4_moe_lite", **LATENTS, "max_position_embeddings": 300},
    ),
    "granite 4 h": ("granite 4, states", {"max_position_embeddings": 300}),
    "bitnet": ("bitnet, norms before attn_out and mlp_mid", {"max_position_embeddings": 300}),
    "cohere2": (
        "cohere2, attention and MLP side by side",
        {"sliding_window": 60, "max_position_embeddings": 300},
    ),
    "apertus": ("apertus, xIELU", {"max_position_embeddings": 300}),
    "gemma3": ("gemma3, two rotary tables", {"sliding_window": 60, "max_position_embeddings": 300}),
}


@cache
def generated(name: str) -> tuple[PackedModel, list[int], Tensor]:
    """A model, and what the stock one generates: the tokens, and the logits before each."""
    variant, changes = MODELS[name]
    packed = random_model(variant, **changes)
    stock = stock_model(packed)
    stock.generation_config.eos_token_id = None
    told = {"return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        expected = stock.generate(torch.tensor([IDS]), max_new_tokens=TOKENS, do_sample=False, **told)
    return packed, expected.sequences[0, len(IDS) :].tolist(), torch.cat(expected.logits)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_their_logits_are_those_of_the_stock_model(name: str) -> None:
    packed, expected, wanted = generated(name)
    engine = Engine(packed, backend="reference")
    logits, tokens = [engine.prefill(IDS)], []
    while len(tokens) < TOKENS:
        tokens.append(int(logits[-1].argmax()))
        logits.append(engine.step(tokens[-1]))
    assert tokens == expected
    found = torch.stack(logits[:-1])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


@every_backend_that(lambda row: not row.traits.isdisjoint(TRAITS) and row.name != "reference")
@pytest.mark.parametrize("name", MODELS)
def test_backends_stay_with_the_stock_model_all_along(name: str, backend: str) -> None:
    """After each of its tokens they choose what the reference chooses, but where two are about as likely. The reference
    is the stock model of this version of transformers (above); others do not read a text again that becomes long."""
    packed, tokens, _ = generated(name)
    engines = engine_of(packed, backend), Engine(packed, backend="reference")
    found, wanted = (torch.stack([each.prefill(IDS), *(each.step(id) for id in tokens[:-1])]).cpu() for each in engines)
    ids = [*IDS, *tokens[:-1]]
    check_logits(found, wanted, backend, packed, ids, len(ids))
    assert int((found.argmax(1) == wanted.argmax(1)).sum()) >= ALIKE

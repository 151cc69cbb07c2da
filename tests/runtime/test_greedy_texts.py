"""Long greedy texts are those that transformers generates, in every family that computes something of its own."""

from typing import Any

import pytest
import torch
from packed_models import random_model, stock_model

from sparsepack.runtime.engine import Engine

IDS = torch.randint(300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
TOKENS = 256
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
    "gemma3": ("gemma3, two rotary tables", {"sliding_window": 60, "max_position_embeddings": 300}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_tokens_and_their_logits_are_those_of_the_stock_model(name: str) -> None:
    variant, changes = MODELS[name]
    packed = random_model(variant, **changes)
    stock = stock_model(packed)
    stock.generation_config.eos_token_id = None
    told = {"return_dict_in_generate": True, "output_logits": True}
    expected = stock.generate(torch.tensor([IDS]), max_new_tokens=TOKENS, do_sample=False, **told)
    engine = Engine(packed, backend="reference")
    logits, tokens = [engine.prefill(IDS)], []
    while len(tokens) < TOKENS:
        tokens.append(int(logits[-1].argmax()))
        logits.append(engine.step(tokens[-1]))
    assert tokens == expected.sequences[0, len(IDS) :].tolist()
    found, wanted = torch.stack(logits[:-1]), torch.cat(expected.logits)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4

"""Texts that become longer than a model's usual rotary frequencies are for turn as transformers turns them."""

from functools import cache
from typing import Any

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend_that, largest_difference
from packed_models import random_model, stock_model

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import LONG_TEXTS, find_backend
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions

LONGROPE, DYNAMIC = "phi3, a part of each head, longrope", "llama"
SHORT = 16
CHANGES: dict[str, dict[str, Any]] = {
    LONGROPE: {},
    DYNAMIC: {
        "max_position_embeddings": SHORT,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
every_backend = every_backend_that(lambda row: LONG_TEXTS in row.traits)
every_kind = pytest.mark.parametrize("kind", CHANGES)


@cache
def models(kind: str) -> tuple[PackedModel, Any]:
    packed = random_model(kind, **CHANGES[kind])
    return packed, stock_model(packed)


def by_steps(kind: str, prompt: int) -> torch.Tensor:
    """The stock model's logits after each token from the prompt's last on, as transformers decodes: what is cached
    stays, but where a text of longrope becomes long, it is computed again."""
    packed, _ = models(kind)
    stock = stock_model(packed)  # its rotary embedding remembers the longest text
    logits, cached = [], None
    for length in range(prompt, len(IDS) + 1):
        if kind == LONGROPE and length == SHORT + 1:
            cached = None
        first = 0 if cached is None else length - 1
        with torch.no_grad():
            output = stock(torch.tensor([IDS[first:length]]), past_key_values=cached, use_cache=True)
        cached = output.past_key_values
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


@every_backend
@every_kind
@pytest.mark.parametrize("prompt", [5, SHORT, SHORT + 1, 30])
def test_steps_beyond_the_usual_length_are_the_stock_models(backend: str, kind: str, prompt: int) -> None:
    engine = engine_of(models(kind)[0], backend)
    found = [engine.prefill(IDS[:prompt]), *(engine.step(id) for id in IDS[prompt:])]
    assert largest_difference(torch.stack(found), by_steps(kind, prompt)) < TOLERANCE[backend]


@every_backend
@every_kind
@pytest.mark.parametrize("length", [SHORT, SHORT + 1, 40])
def test_a_whole_text_turns_by_its_length(backend: str, kind: str, length: int) -> None:
    packed, _ = models(kind)
    with torch.no_grad():
        expected = stock_model(packed)(torch.tensor([IDS[:length]])).logits[0]
    engine = engine_of(packed, backend)
    assert largest_difference(engine.teacher_forced(IDS[:length], length), expected) < TOLERANCE[backend]


@every_backend
def test_texts_side_by_side_turn_by_their_own_lengths(backend: str) -> None:
    packed, _ = models(LONGROPE)
    engine = engine_of(packed, backend, sequences=2)
    alone = engine_of(packed, backend)
    expected = [alone.prefill(IDS[:14]), *(alone.step(id) for id in IDS[14:20])]
    engine.prefill(IDS[:30], 0)
    found = [engine.prefill(IDS[:14], 1)]
    for step in range(6):
        found.append(engine.step_all([IDS[30 + step], IDS[14 + step]])[1])
    assert largest_difference(torch.stack(found), torch.stack(expected)) < TOLERANCE[backend]
    engine.copy(0, 1, 30)  # a long text in the place of one, and then a short one again
    longer = [engine.step_all([None, id])[1] for id in IDS[30:33]]
    assert largest_difference(torch.stack(longer), by_steps(LONGROPE, 30)[1:4]) < TOLERANCE[backend]
    engine.truncate(9, 1)
    assert largest_difference(engine.step_all([None, IDS[9]])[1], by_steps(LONGROPE, 9)[1]) < TOLERANCE[backend]


def test_a_backend_without_long_texts_takes_the_usual_length_alone() -> None:
    packed = random_model("llama", **CHANGES[DYNAMIC])
    row = find_backend("metal")
    check_features(row, EngineOptions(context=SHORT), packed)
    with pytest.raises(UserError, match=f"the metal backend does not compute all of this model .{LONG_TEXTS}.;"):
        check_features(row, EngineOptions(context=SHORT + 1), packed)

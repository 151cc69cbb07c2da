"""Given tokens of several sequences that an engine scores together, each by its own active columns."""

from functools import cache, partial
from typing import Any

import pytest
from backends import SHARE, TOLERANCE, engine_of, every_backend_that, largest_difference
from model_table import LATENTS
from packed_models import by_neurons, random_model, stock_model, with_levels, with_rules
from rounding import check_logits

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.decoder import GivenTokens, shared_prefixes

every_backend = every_backend_that(lambda row: row.scores_rows)
QUESTION = [5, 9, 17, 20, 31, 44, 58, 60, 71, 90]
ROWS = [
    GivenTokens([*QUESTION, 101, 102, 103], 10, 9),
    GivenTokens([*QUESTION, 104], 10, 9),
    GivenTokens([*QUESTION[:3], 105, 106], 0, 2),
    GivenTokens([7, 8, 9, 10, 11, 12], 6, 0),
]


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 43}
DEEPSEEK = {"model_type": "deepseek_v2", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **LATENTS}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "planes": ("llama", {"block": "Q6_P"}),
    "Q8_0": ("qwen2, biases, tied", {"block": "Q8_0"}),
    "delta nets": ("qwen3.5, states", {}),
    "Mamba": ("granite 4, states", {}),
    "convolutions": ("lfm2, short convolutions", {}),
    "experts": ("llama", MIXTURE),
    "experts of planes": ("llama", {**MIXTURE, "block": "Q6_P"}),
    "latents": ("llama", DEEPSEEK),
    "shared keys": ("gemma4, inputs of each layer, shared keys and values", {}),
    "side by side": ("cohere2, attention and MLP side by side", {}),
    "norms": ("bitnet, norms before attn_out and mlp_mid", {}),
}


@cache
def model(name: str) -> PackedModel:
    if name == "neurons":
        return by_neurons(random_model("llama, one head, relu", hidden_size=256, num_hidden_layers=3))
    variant, changes = MODELS[name]
    packed = random_model(variant, **changes)
    rules = partial(with_rules, packed, stock_model(packed), list(ROWS[0].ids), [0, 10])
    return with_levels(packed) if changes.get("block") == "Q6_P" else rules()


@every_backend
@pytest.mark.parametrize("name", [*MODELS, "neurons"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_together_have_the_logits_and_the_activity_of_each_alone(backend: str, name: str, threads: int) -> None:
    packed = model(name)
    engine, alone = engine_of(packed, backend, sequences=4, threads=threads), engine_of(packed, "reference")
    found = engine.teacher_forced_rows(ROWS)
    active: dict[tuple[int, str], float] = {}
    stepped = 0
    for row, logits in zip(ROWS, found, strict=True):
        expected = alone.teacher_forced(row.ids, row.sparse_from)[row.scored_from :]
        check_logits(logits, expected, backend, packed, list(row.ids), row.sparse_from)
        count = alone.counts()
        stepped += count.stepped
        for key, share in alone.activity().items():
            active[key] = active.get(key, 0.0) + share * count.stepped
    assert engine.counts().stepped == stepped
    shares = {key: share / stepped for key, share in active.items()}
    assert engine.activity() == pytest.approx(shares, abs=3 * SHARE[backend])
    assert engine.positions == (13, 11, 5, 6)


@every_backend
def test_a_row_goes_on_where_it_was_scored_to(backend: str) -> None:
    packed = model("llama")
    engine, alone = engine_of(packed, backend, sequences=4), engine_of(packed, backend)
    engine.teacher_forced_rows(ROWS)
    alone.teacher_forced(ROWS[1].ids, 10)
    assert engine.common([*ROWS[1].ids, 3], 1) == 11
    assert largest_difference(engine.step_all([None, 3, None, None])[1], alone.step(3)) < TOLERANCE[backend]


def test_neighbours_share_what_they_begin_with_dense_and_unscored() -> None:
    assert shared_prefixes(ROWS) == [(range(2), 9), (range(2, 3), 0), (range(3, 4), 0)]
    assert shared_prefixes(ROWS, least=10) == [(range(n, n + 1), 0) for n in range(4)]
    assert shared_prefixes([]) == []

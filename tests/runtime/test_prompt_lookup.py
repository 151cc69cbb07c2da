"""Drafts that are looked up in the text: logits of several positions at once, and the texts that come of them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from backends import engine_of, largest_difference
from packed_models import by_neurons, random_model, stock_model, with_levels, with_rules
from test_double_sparsity_engine import model as with_selection
from test_generate import byte_level

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.generation import speculation
from sparsepack.runtime.generation.generate import Generated, generate
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.generation.speculation import MOST_DRAFTED, PromptLookup, decode_drafts, step_cost
from sparsepack.runtime.options import GenerateOptions

IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
VARIANTS = ["llama", "llama tied, biases, llama3 rotary", "qwen3, tied", "phi3, sliding window", "gemma2, soft caps"]


@cache
def skipping(variant: str, **changes: Any) -> PackedModel:
    packed = random_model(variant, **changes)
    return with_rules(packed, stock_model(packed), IDS, [0, 8, 20])


def models(name: str) -> PackedModel:
    if name == "neurons":
        return by_neurons(random_model("llama, one head, relu", hidden_size=256, num_hidden_layers=3))
    return with_selection("llama", skips=True) if name == "selects tokens" else skipping(name)


def far(a: torch.Tensor, b: torch.Tensor) -> int:
    """At how many positions two rows of logits are apart."""
    return int(((a - b).abs().amax(-1) > 0.1).sum())


@pytest.mark.parametrize("name", [*VARIANTS, "neurons", "selects tokens"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("dense", [False, True])
def test_positions_of_a_step_have_the_logits_of_steps(name: str, threads: int, count: int, dense: bool) -> None:
    engines = [engine_of(models(name), "cpu", threads=threads, dense=dense, context=64) for _ in range(2)]
    for engine in engines:
        engine.prefill(IDS[:12])
    together, alone = engines
    found = torch.cat([together.step_positions(IDS[at : at + count]) for at in range(12, 36, count)])
    expected = torch.stack([alone.step(id) for id in IDS[12 : 12 + len(found)]])
    assert together.positions == alone.positions
    assert far(found, expected) <= (0 if dense else 1)  # a column at its threshold
    assert float((found - expected).abs().amax(-1).median()) < 0.05
    read, of_one = together.activity(), alone.activity()
    assert read.keys() == of_one.keys()
    assert all(read[site] >= of_one[site] - 0.01 for site in read)


def test_what_is_cut_back_leaves_the_cache_of_steps() -> None:
    engines = [engine_of(skipping("llama"), "cpu", context=64) for _ in range(2)]
    for engine in engines:
        engine.prefill(IDS[:12])
    together, alone = engines
    together.step_positions([IDS[12], IDS[13], 7, 8, 9])
    together.truncate(14)
    for id in IDS[12:14]:
        alone.step(id)
    assert largest_difference(together.step(IDS[14])[None], alone.step(IDS[14])[None]) < 0.1


@pytest.mark.parametrize("right", [0, 2, 5])
def test_drafts_are_taken_as_far_as_they_are_chosen(right: int) -> None:
    plain = engine_of(skipping("llama"), "cpu", context=64)
    plain.prefill(IDS[:12])
    chosen = [IDS[12]]
    for _ in range(8):
        chosen.append(plain.decode_next(chosen[-1], Sampler(Sampling())))
    engine = engine_of(skipping("llama"), "cpu", context=64)
    engine.prefill(IDS[:12])
    drafts = [*chosen[1 : 1 + right], *((id + 1) % 300 for id in chosen[1 + right : 6])]
    taken: list[int] = []

    def take(id: int) -> bool:
        taken.append(id)
        return True

    accepted = decode_drafts(engine, chosen[0], drafts, Sampler(Sampling()), take)
    assert (accepted, taken) == (right, chosen[1 : 2 + right])
    assert engine.position == 13 + right


def made(prompt: Sequence[int], most: int, **options: Any) -> Generated:
    engine = engine_of(skipping("llama", max_position_embeddings=200), "cpu")
    return generate(engine, byte_level(), list(prompt), GenerateOptions(prompt_lookup=most, **options)).result()


@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "seed": 5}, {"repeat_penalty": 1.05}, {"min_tokens": 9}])
def test_the_text_is_that_of_steps(most: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "step_cost", lambda positions, skips: 1.0)  # so that every match is drafted
    plain, looked_up = (made(IDS[:6] * 3, n, tokens=120, ignore_eos=True, **options) for n in (0, most))
    assert looked_up.tokens == plain.tokens
    assert looked_up.decoded == plain.decoded == 119
    assert looked_up.drafted >= looked_up.accepted >= 0
    assert plain.drafted == 0


def test_a_text_that_repeats_itself_takes_drafts_and_ends_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "step_cost", lambda positions, skips: 1.0)
    bias = {"logit_bias": tuple((id, 100.0) for id in (11,))}  # one token for ever
    whole = made(IDS[:6], 7, tokens=50, **bias)
    assert whole.tokens == (11,) * 50
    assert whole.accepted > 20
    full = made(IDS[:6], 7, tokens=10_000, **bias)
    assert full.reason == "context"
    assert len(full.tokens) == 200 - 6 + 1
    stopped = made(IDS[:6], 7, tokens=50, stop=(whole.text[:1] * 21,), **bias)
    assert stopped.reason == "stop"
    assert len(stopped.tokens) == 21
    ended = made(IDS[:6], 7, tokens=50, stop_token_ids=(11,), min_tokens=0, **bias)
    assert (ended.reason, ended.tokens) == ("eos", ())


def test_drafts_go_on_where_the_text_was_before() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2], 7, skips=False)
    assert lookup.drafts([], 7) == []
    assert lookup.drafts([3], 7) == []  # until matches have been right
    lookup._right = [[0.95, 1.0]] * 6
    assert lookup.drafts([3], 7) == [4, 5, 6, 9, 1, 2, 3]
    assert lookup.drafts([3], 2) == [4, 5]
    assert lookup.drafts([3, 4, 5, 7], 7) == []


def test_a_text_that_breaks_its_matches_gets_no_drafts() -> None:
    lookup, tokens = PromptLookup([1, 2, 3], 7, skips=False), list[int]()
    for number in range(40):
        tokens += [10 + number, 1, 2, 3]
        drafts = lookup.drafts(tokens, 7)
    assert drafts == []


@pytest.mark.parametrize("skips", [False, True])
def test_more_positions_cost_more_in_all_and_less_each(skips: bool) -> None:
    costs = [step_cost(n, skips) for n in range(1, MOST_DRAFTED + 2)]
    assert costs == sorted(costs)
    each = [cost / n for n, cost in enumerate(costs, 1)]
    assert each[1:] == sorted(each[1:], reverse=True)
    assert costs[0] == 1 > each[-1]


@pytest.mark.parametrize(("dense", "most", "drafts"), [(False, None, 0), (True, None, 7), (True, 0, 0), (False, 3, 3)])
def test_drafts_are_the_default_where_nothing_is_skipped(dense: bool, most: int | None, drafts: int) -> None:
    engine = engine_of(skipping("llama"), "cpu", dense=dense)
    lookup = generate(engine, byte_level(), IDS[:4], GenerateOptions(prompt_lookup=most))._lookup
    assert (0 if lookup is None else lookup._most) == drafts


def test_engines_that_cannot_go_back_have_no_drafts_by_default() -> None:
    for engine in (engine_of(random_model("qwen3.5, states"), "cpu"), engine_of(skipping("llama"), "reference")):
        assert generate(engine, byte_level(), IDS[:4], GenerateOptions())._lookup is None


@pytest.mark.parametrize(
    ("variant", "options", "says"),
    [
        ("llama", {"sequences": 2}, "decoded together"),
        ("qwen3.5, states", {}, "keeps a state"),
        ("llama", {"backend": "reference"}, "one position"),
    ],
)
def test_models_and_engines_that_cannot_go_back_refuse(variant: str, options: dict[str, Any], says: str) -> None:
    engine = engine_of(random_model(variant), **{"backend": "cpu", **options})
    with pytest.raises(UserError, match=says):
        generate(engine, byte_level(), IDS[:4], GenerateOptions(prompt_lookup=4))


def test_levels_refuse_unless_dense() -> None:
    packed = with_levels(random_model("llama", block="Q6_P"))
    with pytest.raises(UserError, match="bits that another one needs"):
        engine_of(packed, "cpu").step_positions([1, 2])
    assert engine_of(packed, "cpu", dense=True).step_positions([1, 2]).shape == (2, 300)


def test_a_step_takes_eight_positions() -> None:
    with pytest.raises(UserError, match="expected 1 to 8"):
        engine_of(skipping("llama"), "cpu").step_positions(IDS[:9])

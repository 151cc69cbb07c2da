"""The engine against the stock transformers model with the same weights."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from packed_models import VARIANTS, random_model, stock_logits, stock_model, with_policies
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.policy import active_channels
from sparsepack.runtime import engine as engine_module
from sparsepack.runtime.engine import Engine

TOLERANCE = 1e-3
IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
STARTS = [0, 6, 12]


@cache
def models(variant: str) -> tuple[PackedModel, Any]:
    packed = random_model(variant)
    stock = stock_model(packed)
    return with_policies(packed, stock, IDS, STARTS), stock


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_logits_are_the_stock_models(variant: str) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, len(IDS))
    assert largest_difference(Engine(packed).forced(IDS, len(IDS)), expected) < TOLERANCE
    assert largest_difference(Engine(packed, dense=True).forced(IDS, 4), expected) < TOLERANCE


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_logits_are_those_of_the_stock_model_with_sparsified_inputs(variant: str, start: int) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, start)
    dense, _ = stock_logits(stock, packed, IDS, len(IDS))
    assert largest_difference(Engine(packed).forced(IDS, start), expected) < TOLERANCE
    assert largest_difference(expected[start:], dense[start:]) > 100 * TOLERANCE, "the policies change nothing"


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_steps_give_the_logits_of_the_whole_text_at_once(variant: str) -> None:
    packed, _ = models(variant)
    engine = Engine(packed)
    expected = engine.forced(IDS, 6)
    engine.reset()
    found = [engine.prefill(IDS[:6]), *(engine.step(id) for id in IDS[6:])]
    assert largest_difference(torch.stack(found), expected[5:]) < TOLERANCE


def test_a_text_can_be_decoded_from_its_first_token() -> None:
    packed, stock = models("qwen2, biases, tied")
    engine = Engine(packed)
    found = torch.stack([engine.step(id) for id in IDS])
    assert largest_difference(found, stock_logits(stock, packed, IDS, 0)[0]) < TOLERANCE


def test_steps_of_a_dense_engine_skip_nothing() -> None:
    packed, stock = models("llama")
    engine = Engine(packed, dense=True)
    found = torch.stack([engine.step(id) for id in IDS])
    assert largest_difference(found, stock_logits(stock, packed, IDS, len(IDS))[0]) < TOLERANCE
    assert set(engine.activity().values()) == {1.0}


@pytest.mark.parametrize("variant", ["llama", "mistral, sliding window", "qwen3, tied"])
def test_long_texts_pass_in_chunks(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = models(variant)
    whole = Engine(packed).forced(IDS, 6)
    monkeypatch.setattr(engine_module, "CHUNK", 4)
    assert largest_difference(Engine(packed).forced(IDS, 6), whole) < TOLERANCE


def test_a_prompt_may_come_in_pieces() -> None:
    packed, _ = models("mistral, sliding window")
    engine = Engine(packed)
    expected = engine.forced(IDS, len(IDS))[-1]
    engine.reset()
    engine.prefill(IDS[:7])
    assert largest_difference(engine.prefill(IDS[7:]), expected) < TOLERANCE
    assert engine.position == len(IDS)


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("variant", ["llama", "qwen3, wide heads, yarn"])
def test_activity_is_the_share_of_channels_that_the_policies_call_active(variant: str, by_step: bool) -> None:
    packed, stock = models(variant)
    inputs = stock_logits(stock, packed, IDS, 6)[1].inputs
    engine = Engine(packed)
    if by_step:
        engine.prefill(IDS[:6])
        for id in IDS[6:]:
            engine.step(id)
    else:
        engine.forced(IDS, 6)
    expected = {}
    for (layer, site), x in inputs.items():
        policy = packed.layers[layer].sites[site].policy
        expected[layer, site] = 1.0 if policy is None else float(active_channels(x, policy).double().mean())
    assert engine.activity() == pytest.approx(expected, abs=1e-12)
    assert 0.3 < min(expected.values()) < 0.7


def test_prefill_does_not_count_as_activity() -> None:
    engine = Engine(models("llama")[0])
    engine.prefill(IDS)
    assert engine.activity() == {}


def test_the_same_steps_give_the_same_bits() -> None:
    packed, _ = models("llama, several bands, tied Q6_K")
    runs = []
    for _ in range(2):
        engine = Engine(packed)
        engine.prefill(IDS[:3])
        runs.append(torch.stack([engine.step(id) for id in IDS[3:]]))
    assert torch.equal(*runs)


def test_reset_forgets_the_text() -> None:
    engine = Engine(models("mistral, sliding window")[0])
    first = engine.prefill(IDS)
    engine.step(3)
    engine.reset()
    assert engine.position == 0
    assert engine.activity() == {}
    assert torch.equal(engine.prefill(IDS), first)


def test_thresholds_of_zero_skip_only_zeros() -> None:
    packed, _ = models("llama, one head, relu")
    layers = tuple(
        dataclasses.replace(
            layer,
            sites={
                name: dataclasses.replace(site, policy=dataclasses.replace(site.policy, threshold=torch.zeros(())))
                if site.policy
                else site
                for name, site in layer.sites.items()
            },
        )
        for layer in packed.layers
    )
    engine = Engine(dataclasses.replace(packed, layers=layers))
    dense = engine.forced(IDS, len(IDS))
    assert largest_difference(engine.forced(IDS, 0), dense) < TOLERANCE
    assert engine.activity()[0, "mlp_mid"] < 0.9
    assert engine.activity()[0, "attn_in"] == 1.0


def test_a_full_context_is_an_error_and_changes_nothing() -> None:
    engine = Engine(models("llama")[0], context=len(IDS))
    engine.prefill(IDS)
    with pytest.raises(UserError, match=r"context of 13 tokens: 13 are in it and 1 more do not fit; .*larger context"):
        engine.step(0)
    assert engine.position == len(IDS)
    engine.reset()
    with pytest.raises(UserError, match="14 more do not fit"):
        engine.prefill([*IDS, 0])
    assert engine.position == 0


def test_the_last_position_of_the_context_is_usable() -> None:
    packed, _ = models("llama")
    small = Engine(packed, context=len(IDS)).forced(IDS, 6)
    assert largest_difference(small, Engine(packed).forced(IDS, 6)) < TOLERANCE


def test_the_context_is_the_models_unless_given() -> None:
    packed, _ = models("llama")
    assert Engine(packed).context == 64
    with pytest.raises(UserError, match="context 65: the model was made for 64"):
        Engine(packed, context=65)
    with pytest.raises(UserError, match="context 0"):
        Engine(packed, context=0)


def test_long_contexts_are_cut_to_what_a_cache_should_take() -> None:
    assert Engine(random_model("llama", max_position_embeddings=100_000)).context == 4096


@pytest.mark.parametrize("id", [-1, 300])
def test_an_unknown_token_is_an_error(id: int) -> None:
    with pytest.raises(UserError, match=f"token id {id}: expected 0 to 299"):
        Engine(models("llama")[0]).step(id)


def test_no_tokens_are_an_error() -> None:
    with pytest.raises(UserError, match="0 tokens"):
        Engine(models("llama")[0]).prefill([])


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(UserError, match="backend 'tpu': unknown; expected one of reference"):
        Engine(models("llama")[0], backend="tpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cuda_engine_gives_the_stock_models_logits(variant: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, 6)
    engine = Engine(packed, device="cuda")
    assert largest_difference(engine.forced(IDS, 6).cpu(), expected) < TOLERANCE
    activity = engine.activity()
    engine.reset()
    found = [engine.prefill(IDS[:6]), *(engine.step(id) for id in IDS[6:])]
    assert largest_difference(torch.stack(found).cpu(), expected[5:]) < TOLERANCE
    assert engine.activity() == activity


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        Engine(models("llama")[0], device="cuda")

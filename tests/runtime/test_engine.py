"""The engine against the stock transformers model with the same weights."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from backends import SHARE, TOLERANCE, engine_of, every_backend, largest_difference
from model_table import VARIANTS
from packed_models import random_model, stock_logits, stock_model, with_rules, with_sites
from rounding import check_logits
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.packed import PackedModel
from sparsepack.models.sites import active_channels
from sparsepack.runtime.chained import decoder as operations_decoder
from sparsepack.runtime.cpu import decoder as native_decoder
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
STARTS = [0, 6, 12]


@cache
def models(variant: str) -> tuple[PackedModel, Any]:
    packed = random_model(variant)
    stock = stock_model(packed)
    return with_rules(packed, stock, IDS, STARTS), stock


@cache
def expected_logits(variant: str, start: int) -> Tensor:
    """The stock model's, its inputs sparse from a position on."""
    packed, stock = models(variant)
    return stock_logits(stock, packed, IDS, start)[0]


@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_logits_are_the_stock_models(backend: str, variant: str) -> None:
    packed, expected = models(variant)[0], expected_logits(variant, len(IDS))
    found = engine_of(packed, backend).teacher_forced(IDS, len(IDS))
    check_logits(found, expected, backend, packed, IDS, len(IDS))
    found = engine_of(packed, backend, dense=True).teacher_forced(IDS, 4)
    check_logits(found, expected, backend, packed, IDS, len(IDS))


@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_logits_are_those_of_the_stock_model_with_sparsified_inputs(backend: str, variant: str) -> None:
    packed, dense = models(variant)[0], expected_logits(variant, len(IDS))
    engine = engine_of(packed, backend)
    for start in STARTS:
        expected = expected_logits(variant, start)
        check_logits(engine.teacher_forced(IDS, start), expected, backend, packed, IDS, start)
        assert largest_difference(expected[start:], dense[start:]) > 1, "the rules change nothing"
        engine.reset()


@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_steps_give_the_logits_of_the_whole_text_at_once(backend: str, variant: str) -> None:
    packed, _ = models(variant)
    engine = engine_of(packed, backend)
    expected = engine.teacher_forced(IDS, 6)
    engine.reset()
    found = [engine.prefill(IDS[:6]), *(engine.step(id) for id in IDS[6:])]
    assert largest_difference(torch.stack(found), expected[5:]) < TOLERANCE[backend]


@every_backend
@pytest.mark.parametrize("dense", [False, True])
def test_a_text_can_be_decoded_from_its_first_token(backend: str, dense: bool) -> None:
    packed, stock = models("qwen2, biases, tied")
    engine = engine_of(packed, backend, dense=dense)
    found = torch.stack([engine.step(id) for id in IDS])
    expected = stock_logits(stock, packed, IDS, len(IDS) if dense else 0)[0]
    assert largest_difference(found, expected) < TOLERANCE[backend]
    assert (set(engine.activity().values()) == {1.0}) == dense


@every_backend
@pytest.mark.parametrize("variant", ["llama", "mistral, sliding window", "qwen3, tied"])
def test_long_texts_pass_in_chunks(backend: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = models(variant)
    whole = engine_of(packed, backend).teacher_forced(IDS, 6)
    for module in (operations_decoder, native_decoder, cuda_decoder):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 4)
    assert largest_difference(engine_of(packed, backend).teacher_forced(IDS, 6), whole) < TOLERANCE[backend]


@every_backend
@pytest.mark.parametrize("chunk", [1, 4, 6, 13])
def test_a_prompt_goes_through_layers_without_keys_of_their_own_at_its_end_alone(
    backend: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = models("gemma4, inputs of each layer, shared keys and values")
    engine = engine_of(packed, backend)
    expected = engine.teacher_forced(IDS, 6)
    stepped = engine.counts()
    engine.truncate(0)
    for module in (operations_decoder, native_decoder, cuda_decoder):
        monkeypatch.setattr(module, "PREFILL_TOKENS", chunk)
    assert largest_difference(engine.prefill(IDS[:6]), expected[5]) < TOLERANCE[backend]
    assert engine.counts() == stepped
    found = torch.stack([engine.step(id) for id in IDS[6:]])
    assert largest_difference(found, expected[6:]) < TOLERANCE[backend]
    engine.truncate(0)
    engine.prefill(IDS[:4])
    assert largest_difference(engine.prefill(IDS[4:6]), expected[5]) < TOLERANCE[backend]


@every_backend
def test_a_prompt_may_come_in_pieces(backend: str) -> None:
    packed, _ = models("mistral, sliding window")
    engine = engine_of(packed, backend)
    expected = engine.teacher_forced(IDS, len(IDS))[-1]
    engine.reset()
    engine.prefill(IDS[:7])
    assert largest_difference(engine.prefill(IDS[7:]), expected) < TOLERANCE[backend]
    assert engine.position == len(IDS)


@every_backend
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("variant", ["llama", "qwen3, wide heads, yarn"])
def test_activity_is_the_share_of_channels_that_the_rules_call_active(
    backend: str, variant: str, by_step: bool
) -> None:
    packed, stock = models(variant)
    inputs = stock_logits(stock, packed, IDS, 6)[1].inputs
    engine = engine_of(packed, backend)
    if by_step:
        engine.prefill(IDS[:6])
        for id in IDS[6:]:
            engine.step(id)
    else:
        engine.teacher_forced(IDS, 6)
    expected = {}
    for (layer, site), x in inputs.items():
        rule = packed.layers[layer].sites[site].rule
        expected[layer, site] = 1.0 if rule is None else float(active_channels(x, rule).double().mean())
    assert engine.activity() == pytest.approx(expected, abs=SHARE[backend])
    assert 0.3 < min(expected.values()) < 0.7


@every_backend
def test_the_same_steps_give_the_same_bits(backend: str) -> None:
    packed, _ = models("llama, several bands, tied Q6_K")
    runs = []
    for _ in range(2):
        engine = engine_of(packed, backend)
        engine.prefill(IDS[:3])
        runs.append(torch.stack([engine.step(id) for id in IDS[3:]]))
    assert torch.equal(*runs)


@every_backend
def test_a_tied_embedding_in_q8_0_is_looked_up_and_multiplied(backend: str) -> None:
    packed = models("qwen2, biases, tied")[0]
    weights = decode_matrix(packed.embedding)
    matrix = PackedMatrix(BLOCKS["Q8_0"].encode(weights), MatrixFormat("Q8_0"), *weights.shape)
    packed = dataclasses.replace(packed, embedding=matrix, output=matrix)
    expected = engine_of(packed, "reference").teacher_forced(IDS, len(IDS))
    found = engine_of(packed, backend).teacher_forced(IDS, len(IDS))
    assert largest_difference(found, expected) < TOLERANCE[backend]


@every_backend
def test_prefill_does_not_count_as_activity_and_reset_forgets_the_text(backend: str) -> None:
    engine = engine_of(models("mistral, sliding window")[0], backend)
    first = engine.prefill(IDS)
    assert engine.activity() == {}
    engine.step(3)
    assert engine.activity()
    engine.reset()
    assert engine.position == 0
    assert engine.activity() == {}
    assert torch.equal(engine.prefill(IDS), first)


@every_backend
def test_thresholds_of_zero_skip_only_zeros(backend: str) -> None:
    packed, _ = models("llama, one head, relu")
    layers = tuple(
        with_sites(
            layer,
            {
                name: dataclasses.replace(site, rule=dataclasses.replace(site.rule, threshold=torch.zeros(())))
                if site.rule
                else site
                for name, site in layer.sites.items()
            },
        )
        for layer in packed.layers
    )
    engine = engine_of(dataclasses.replace(packed, layers=layers), backend)
    dense = engine.teacher_forced(IDS, len(IDS))
    assert largest_difference(engine.teacher_forced(IDS, 0), dense) < TOLERANCE[backend]
    assert engine.activity()[0, "mlp_mid"] < 0.9
    assert engine.activity()[0, "attn_in"] == 1.0


@every_backend
def test_a_full_context_is_an_error_and_changes_nothing(backend: str) -> None:
    engine = engine_of(models("llama")[0], backend, context=len(IDS))
    engine.prefill(IDS)
    with pytest.raises(UserError, match=r"context of 13 tokens: 13 are in it and 1 more do not fit; .*larger context"):
        engine.step(0)
    assert engine.position == len(IDS)
    engine.reset()
    with pytest.raises(UserError, match="14 more do not fit"):
        engine.prefill([*IDS, 0])
    assert engine.position == 0


@every_backend
def test_the_last_position_of_the_context_is_usable(backend: str) -> None:
    packed, _ = models("llama")
    small = engine_of(packed, backend, context=len(IDS)).teacher_forced(IDS, 6)
    assert largest_difference(small, engine_of(packed, backend).teacher_forced(IDS, 6)) < TOLERANCE[backend]


@every_backend
def test_the_context_is_the_models_unless_given_and_no_more_than_a_cache_should_take(backend: str) -> None:
    packed, _ = models("llama")
    assert engine_of(packed, backend).context == 64
    with pytest.raises(UserError, match="context 65: the model was made for 64"):
        engine_of(packed, backend, context=65)
    with pytest.raises(UserError, match="context 0"):
        engine_of(packed, backend, context=0)
    assert engine_of(random_model("llama", max_position_embeddings=100_000), backend).context == 4096


def test_unknown_tokens_and_none_are_errors() -> None:
    engine = engine_of(models("llama")[0], "reference")
    for id in (-1, 300):
        with pytest.raises(UserError, match=f"token id {id}: expected 0 to 299"):
            engine.step(id)
    with pytest.raises(UserError, match="0 tokens"):
        engine.prefill([])


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(UserError, match="backend 'tpu': unknown; expected one of reference, cpu, cuda"):
        Engine(models("llama")[0], backend="tpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_on_cuda_gives_the_stock_models_logits(variant: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, 6)
    engine = Engine(packed, device="cuda", backend="reference")
    assert largest_difference(engine.teacher_forced(IDS, 6), expected) < TOLERANCE["reference"]
    activity = engine.activity()
    engine.reset()
    found = [engine.prefill(IDS[:6]), *(engine.step(id) for id in IDS[6:])]
    assert largest_difference(torch.stack(found), expected[5:]) < TOLERANCE["reference"]
    assert engine.activity() == activity


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        Engine(models("llama")[0], device="cuda")


# going on from a text


@every_backend
def test_what_a_text_has_in_common_with_another_is_kept(backend: str) -> None:
    packed, _ = models("llama")
    engine, other = engine_of(packed, backend), [*IDS[:7], *reversed(IDS)]
    engine.prefill(IDS[:9])
    for id in IDS[9:]:
        engine.decode_next(id, Sampler(Sampling()))
    assert engine.keep(other) == engine.position == 7
    found = engine.prefill(other[7:])
    fresh = engine_of(packed, backend)
    assert largest_difference(found, fresh.prefill(other)) < TOLERANCE[backend]
    assert engine.keep(other) == len(other) - 1, "the last token's logits are wanted"
    assert engine.keep([]) == engine.position == 0


@every_backend
def test_a_text_can_be_cut_and_gone_on_with(backend: str) -> None:
    packed, _ = models("llama")
    engine = engine_of(packed, backend)
    engine.prefill(IDS[:4])
    expected = [engine.step(id) for id in IDS[4:]]
    engine.truncate(4)
    assert engine.position == 4
    for id, logits in zip(IDS[4:], expected, strict=True):
        assert torch.equal(engine.step(id), logits)
    with pytest.raises(UserError, match="expected 0 to 13"):
        engine.truncate(14)


@every_backend
def test_activity_can_be_counted_from_any_time(backend: str) -> None:
    packed, _ = models("llama")
    engine, alone = engine_of(packed, backend), engine_of(packed, backend)
    engine.prefill(IDS[:3])
    engine.step(IDS[3])
    since = engine.counts()
    assert engine.activity(since) == {}
    assert engine.skipped(since) is None
    engine.step(IDS[4])
    alone.prefill(IDS[:3])
    alone.step(IDS[3])
    alone.step(IDS[4])
    both, first = alone.activity(), engine.activity(since)
    assert both.keys() == first.keys()
    assert 0 < engine.skipped(since).overall < 1
    assert engine.counts().stepped == since.stepped + 1


@every_backend
def test_an_interrupted_call_costs_the_text_and_nothing_else(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = models("llama")
    engine = engine_of(packed, backend)
    engine.prefill(IDS[:5])
    engine._decoder.prefill(0, torch.tensor(IDS[5:7]))  # as Ctrl-C may leave it
    assert engine.keep(IDS) == 0
    assert largest_difference(engine.prefill(IDS), engine_of(packed, backend).prefill(IDS)) < TOLERANCE[backend]


@every_backend
def test_a_penalty_is_heeded_on_every_backend(backend: str) -> None:
    packed, _ = models("llama")
    engine, oracle = engine_of(packed, backend), engine_of(packed, backend)
    sampling = Sampling(repeat_penalty=1.8)
    sampler, expected = Sampler(sampling, IDS), Sampler(sampling, IDS)
    id, other = sampler.choose(engine.prefill(IDS)), expected.choose(oracle.prefill(IDS))
    for _ in range(20):
        assert id == other
        id, other = engine.decode_next(id, sampler), expected.choose(oracle.step(other))

"""Engines on models whose residual stream changes its basis before some blocks, against the stock model that does."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from backends import (
    SHARE,
    TOLERANCE,
    engine_of,
    every_backend,
    every_backend_of_several_texts,
    every_backend_that,
    largest_difference,
)
from packed_models import by_neurons, random_model, stock_logits, stock_model, with_bases, with_rules
from rounding import check_logits
from torch import Tensor
from union import Union, union_logits

from sparsepack.bench.decode import bytes_per_token, parameters, stored_bytes
from sparsepack.formats.kinds import NEURONS
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.chained import decoder as operations_decoder
from sparsepack.runtime.cpu import decoder as native_decoder
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = torch.randint(300, (3, 9), generator=torch.Generator().manual_seed(2)).tolist()
SEGMENTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one change": ((2,), {}),
    "before every block": ((0, 1, 2), {}),
    "in float16, a width of odd size": ((1, 2), {"hidden_size": 80, "type": "F16"}),
    "gate and up in one product": ((1,), {"hidden_size": 128, "intermediate_size": 768, "num_hidden_layers": 2}),
}
every_variant = pytest.mark.parametrize("variant", SEGMENTS)


@cache
def models(variant: str) -> tuple[PackedModel, Any]:
    starts, changes = SEGMENTS[variant]
    type, changes = changes.get("type", "Q8_0"), {name: value for name, value in changes.items() if name != "type"}
    packed = with_bases(random_model("llama", **{"num_hidden_layers": 3, **changes}), starts, type)
    stock = stock_model(packed)
    return with_rules(packed, stock, IDS, [0, 6, 12]), stock


@cache
def oracle(variant: str, sequences: int) -> tuple[Tensor, Tensor, Union]:
    return union_logits(models(variant)[0], sequences, 3, clear=1e-3)  # keys and values in half precision


@cache
def neurons() -> PackedModel:
    relu = random_model("llama, one head, relu", hidden_size=256, num_hidden_layers=3)
    return by_neurons(with_bases(relu, (0, 2)))


@every_backend
@every_variant
def test_dense_logits_are_the_stock_models(backend: str, variant: str) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, len(IDS))
    layers = tuple(replace(layer, basis=None) for layer in packed.layers)
    plain, _ = stock_logits(stock_model(replace(packed, layers=layers)), packed, IDS, len(IDS))
    assert largest_difference(expected, plain) > 1, "the bases change nothing"
    engine = engine_of(packed, backend)
    assert largest_difference(engine.teacher_forced(IDS, len(IDS)), expected) < TOLERANCE[backend]
    engine = engine_of(packed, backend, dense=True)
    assert largest_difference(engine.teacher_forced(IDS, 4), expected) < TOLERANCE[backend]


@every_backend
@pytest.mark.parametrize("sequences", [1, 2])
@every_variant
def test_sparse_steps_are_the_stock_models_on_sparsified_inputs(backend: str, variant: str, sequences: int) -> None:
    if sequences > (most := find_backend(backend).sequences):
        pytest.skip(f"the {backend} backend decodes {most} together")
    texts, expected, watch = oracle(variant, sequences)
    engine = engine_of(models(variant)[0], backend, sequences=sequences)
    found = torch.stack([engine.step_all(column) for column in texts.t().tolist()], dim=1)
    check_logits(found, expected, backend, models(variant)[0], texts.tolist(), 0)
    units = {key: models(variant)[0].layers[key[0]].units[key[1]] for key in watch.counts}
    shares = {key: count / (texts.shape[1] * units[key]) for key, count in watch.counts.items()}
    assert engine.activity() == pytest.approx(shares, abs=SHARE[backend])


@every_backend
@every_variant
def test_prefill_and_steps_are_the_whole_text_at_once(
    backend: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, len(IDS))
    for module in (operations_decoder, native_decoder, cuda_decoder):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 3)
    engine = engine_of(packed, backend, dense=True)
    found = [engine.prefill(IDS[:5]), engine.prefill(IDS[5:7]), *(engine.step(id) for id in IDS[7:])]
    assert largest_difference(torch.stack(found), expected[[4, 6, *range(7, 13)]]) < TOLERANCE[backend]


@every_backend_of_several_texts
@pytest.mark.parametrize("threads", [1, 3])
@every_variant
def test_texts_of_different_lengths_are_those_of_engines_alone(backend: str, variant: str, threads: int) -> None:
    packed, stock = models(variant)
    engine = engine_of(packed, backend, sequences=3, dense=True, threads=threads)
    for n in range(3):
        engine.prefill(TEXTS[n][: 2 + n], n)
    found = torch.stack([engine.step_all([TEXTS[n][2 + n + i] for n in range(3)]) for i in range(4)])
    for n in range(3):
        expected, _ = stock_logits(stock, packed, TEXTS[n], len(TEXTS[n]))
        assert largest_difference(found[:, n], expected[2 + n : 6 + n]) < TOLERANCE[backend]


@every_backend_of_several_texts
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_steps_give_the_same_bits_alone_and_beside_texts_that_stand_still(backend: str, threads: int) -> None:
    packed, _ = models("before every block")
    several = engine_of(packed, backend, sequences=2, threads=threads)
    for _ in range(2):
        alone = engine_of(packed, backend, threads=threads)
        several.reset()
        assert torch.equal(alone.prefill(IDS[:4]), several.prefill(IDS[:4], 1))
        for id in IDS[4:]:
            found = several.step_all([None, id])[1]
            if backend != "cuda":  # its steps of several sum in another order
                assert torch.equal(alone.step(id), found)
    steps = [[alone.step(id) for id in TEXTS[0]] for alone in (engine_of(packed, backend) for _ in range(2))]
    assert torch.equal(torch.stack(steps[0]), torch.stack(steps[1]))


@every_backend_that(lambda row: NEURONS in row.mlps)
@pytest.mark.parametrize("threads", [2, 3])
def test_models_by_neurons_and_with_slots_change_their_basis_too(backend: str, threads: int) -> None:
    packed = neurons()
    expected, _ = stock_logits(stock_model(packed), packed, IDS, len(IDS))
    for options in ({}, {"cached": 0.3}) if backend == "cuda" else ({},):
        engine = engine_of(packed, backend, threads=threads, **options)
        assert largest_difference(engine.teacher_forced(IDS, 6), expected) < TOLERANCE[backend]
    engine = engine_of(packed, backend, sequences=2, threads=threads)
    found = torch.stack([engine.step_all([id, id]) for id in IDS])
    for n in range(2):
        assert largest_difference(found[:, n], expected) < TOLERANCE[backend]


@pytest.mark.parametrize("type", ["Q8_0", "F16"])
def test_a_change_of_basis_is_stored_and_read_whole_and_skips_nothing(type: str) -> None:
    plain = random_model("llama")
    packed = with_bases(plain, (1,), type)
    size = 64 * 64 * 2 if type == "F16" else 64 * 64 // 32 * 34
    assert stored_bytes(packed) - stored_bytes(plain) == size
    assert parameters(packed) - parameters(plain) == 64 * 64
    activity = {(1, "mlp_mid"): 0.25}
    assert bytes_per_token(packed, activity) - bytes_per_token(plain, activity) == size
    before, after = (skipped_weights(model, activity) for model in (plain, packed))
    weights = sum(plain.parameters.values())
    assert after.overall == pytest.approx(before.overall * weights / (weights + 64 * 64))
    assert (before.of_sparse_sites, after.of_sparse_sites) == (0.75, 0.75)

"""Engines of models that keep a state in some layers: what cannot be forgotten is computed anew, never wrong."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend_that, largest_difference
from model_table import DELTA_MIXTURE
from packed_models import random_model, stock_model, with_rules
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import ATTENTION_GATES, BACKENDS, DELTA_NETS
from sparsepack.runtime.chained import decoder as operations_decoder
from sparsepack.runtime.cpu import decoder as native_decoder
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.free_memory import cache_bytes
from sparsepack.runtime.options import EngineOptions

every_backend = every_backend_that(lambda row: {DELTA_NETS, ATTENTION_GATES} <= row.traits)
IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(300, (24,), generator=torch.Generator().manual_seed(6)).tolist()


@cache
def model(variant: str = "qwen3.5, states") -> PackedModel:
    packed = random_model(variant)
    return with_rules(packed, stock_model(packed), IDS, [0, 6, 12])


def engine(backend: str, **options: Any) -> Engine:
    return engine_of(model(), backend, **options)


def after(backend: str, ids: list[int]) -> Tensor:
    """The logits after a dense text."""
    return engine(backend).prefill(ids)


def logits_after_each(engine: Engine, ids: list[int]) -> Tensor:
    return torch.stack([engine.step(id) for id in ids]).cpu()


def rounded(engine: Engine, error: float, seed: int) -> Engine:
    """An engine of the reference, from now on with products that are off by a relative error in random directions."""
    generator = torch.Generator().manual_seed(seed)
    decoder: Any = engine._decoder

    def noisy(operation: Any) -> Any:
        def product(matrix: Any, x: Tensor, *selected: Tensor) -> Tensor:
            y: Tensor = operation(matrix, x, *selected)
            noise = torch.randn(y.shape, generator=generator)
            return y + error * y.square().mean(-1, keepdim=True).sqrt() * noise

        return product

    plain = decoder._operations
    names = ("zigzag_matmul", "zigzag_gemv")
    operations = SimpleNamespace(**{name: noisy(getattr(plain, name)) for name in names}, collect=plain.collect)
    for layer in decoder._layers:
        for part in (*layer.attention.values(), layer.mlp):
            object.__setattr__(part, "operations", operations)
    return engine


@every_backend
def test_a_prompt_in_pieces_is_the_prompt(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = after(backend, IDS)
    in_pieces = engine(backend)
    for first in range(0, 24, 5):
        found = in_pieces.prefill(IDS[first : first + 5])
    assert largest_difference(found, expected) < TOLERANCE[backend]
    for module in (operations_decoder, native_decoder, cuda_decoder):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 7)
    assert largest_difference(after(backend, IDS), expected) < TOLERANCE[backend]


@every_backend
def test_tokens_one_by_one_are_the_prompt(backend: str) -> None:
    dense = engine(backend, dense=True)
    found = [dense.step(id) for id in IDS]
    assert largest_difference(found[-1], after(backend, IDS)) < TOLERANCE[backend]


@every_backend
def test_a_text_cut_short_is_computed_anew(backend: str) -> None:
    cut = engine(backend)
    cut.prefill(IDS[:10])
    for id in OTHER[:4]:
        cut.step(id)
    cut.truncate(8)
    assert cut.position == 8
    assert largest_difference(cut.prefill(IDS[8:]), after(backend, IDS)) < TOLERANCE[backend]
    cut.truncate(0)
    assert torch.equal(cut.prefill(IDS), after(backend, IDS))


@every_backend
def test_all_of_a_text_is_kept_or_nothing(backend: str) -> None:
    kept = engine(backend)
    kept.prefill(IDS[:10])
    assert (kept.common(IDS), kept.reusable(10), kept.reusable(9)) == (10, 10, 0)
    assert kept.common([*IDS[:9], 7, 8, 9]) == 0
    assert kept.keep(IDS) == 10
    assert largest_difference(kept.prefill(IDS[10:]), after(backend, IDS)) < TOLERANCE[backend]
    assert kept.keep(IDS[:12]) == 0
    assert torch.equal(kept.prefill(IDS[:12]), after(backend, IDS[:12]))


@every_backend
def test_copies_go_on_alone(backend: str) -> None:
    several = engine(backend, sequences=3)
    several.prefill(IDS[:10], 1)
    several.copy(1, 0, 10)
    several.copy(1, 2, 6)
    assert several.positions == (10, 10, 6)
    for sequence, ids in ((1, OTHER), (0, IDS[10:]), (2, IDS[6:])):
        found = several.prefill(ids, sequence)
        expected = after(backend, [*IDS[: 10 if sequence < 2 else 6], *ids])
        assert largest_difference(found, expected) < TOLERANCE[backend]


@every_backend
def test_a_sequence_that_stands_still_keeps_its_state(backend: str) -> None:
    several = engine(backend, sequences=3, dense=True)
    for sequence in range(3):
        several.prefill(IDS[: 4 + sequence], sequence)
    for id in OTHER[:5]:
        several.step_all([id, None, id])
    found = several.step_all([None, IDS[5], None])[1]
    assert largest_difference(found, after(backend, IDS[:6])) < TOLERANCE[backend]


@every_backend
def test_a_call_that_was_interrupted_leaves_no_state_behind(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engine(backend)
    broken.prefill(IDS[:6])
    decoder: Any = broken._decoder
    # As an interrupt between two blocks leaves it: the state has tokens that the cache does not count.
    decoder.prefill(0, torch.tensor(IDS[6:9]))
    decoder.cache.truncate(6)
    with pytest.raises((UserError, RuntimeError), match="begin the sequence anew"):
        broken.prefill(IDS[6:])
    broken.reset()
    assert torch.equal(broken.prefill(IDS), after(backend, IDS))


@every_backend_that(lambda row: {DELTA_NETS, ATTENTION_GATES} <= row.traits and row.name != "reference")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_long_text_is_as_far_from_the_reference_as_rounded_products(backend: str, seed: int) -> None:
    """The norm behind a state divides by what a head reads from it, which at some tokens is a hundredth of what is
    summed up for it. Errors of 5e-5 in products, which are those of backends that round what they multiply, are one of
    0.4 of logits up to 9 there, and no router has chosen otherwise."""
    variant = {**DELTA_MIXTURE, "max_position_embeddings": 300}
    packed = random_model("llama", seed, **variant)
    ids = torch.randint(300, (256,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = logits_after_each(Engine(packed, backend="reference", dense=True), ids)

    def off_by(engine: Engine) -> Tensor:
        return (logits_after_each(engine, ids) - expected).abs().amax(1)

    off = off_by(engine_of(packed, backend, dense=True))
    draws = (Engine(packed, backend="reference", dense=True) for _ in range(3))
    noise = torch.stack([off_by(rounded(each, 5e-5, draw)) for draw, each in enumerate(draws)]).amax(0)
    assert off.median() < 2 * noise.median() < 0.02
    assert off.amax() < 4 * noise.amax()
    assert noise[off.argmax()] > 4 * noise.median(), "rounding is not felt at this token"


def test_backends_without_states_refuse_in_one_line() -> None:
    with pytest.raises(UserError, match="does not compute all of this model") as refusal:
        check_features(BACKENDS["metal"], EngineOptions(), model())
    assert DELTA_NETS in str(refusal.value)
    with pytest.raises(UserError, match="vram: models that keep a state are not divided") as divided:
        check_features(BACKENDS["cuda"], EngineOptions(vram="1GB"), model())
    assert "\n" not in str(refusal.value) + str(divided.value)


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        ("nemotron, LayerNorm, without a gate", "models with LayerNorm"),
        ("gemma4, heads of two sizes", "models with heads of two sizes"),
    ],
)
def test_other_models_are_not_divided(variant: str, what: str) -> None:
    with pytest.raises(UserError, match=f"vram: {what} are not divided"):
        check_features(BACKENDS["cuda"], EngineOptions(vram="1GB"), random_model(variant))


def test_a_sequence_takes_keys_and_values_of_its_attention_alone_and_a_state() -> None:
    a = model().architecture
    keys_and_values = 2 * a.kv_heads * a.head_dim * 64 * 4
    state = 6 * 12 * 8 + 3 * (2 * 2 * 8 + 6 * 12)
    assert cache_bytes(a, 64, "f32") == keys_and_values + 3 * 4 * state

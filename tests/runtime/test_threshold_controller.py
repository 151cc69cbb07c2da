"""A held share: thresholds that follow each text, on every backend, against the record that says how."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend, every_backend_of_several_texts, largest_difference
from packed_models import by_neurons, random_model, stock_model, with_rules, with_sites
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.runtime import threshold_controller as hold
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference import products
from sparsepack.runtime.reference.backend import ReferenceOperations
from sparsepack.runtime.threshold_controller import (
    LEAST_SCALE,
    MOST_SCALE,
    SequenceScale,
    ThresholdController,
    new_controller,
)

TEXTS = torch.randint(300, (4, 48), generator=torch.Generator().manual_seed(5)).tolist()
every_variant = pytest.mark.parametrize("variant", ["llama", "llama, several bands, tied Q6_K", "qwen3, tied"])
FLIPPED = 2e-3
"""Of a scale, where rounding decides about a column or two."""
SAME = {name: FLIPPED if name == "cuda" else 1e-5 for name in BACKENDS}
"""Of a scale: on the CPU rounding decides about no column of the texts that are compared."""
STOOD = {name: 1e-2 if name == "cuda" else FLIPPED for name in BACKENDS}
"""Of a scale, where texts stand still: a GPU steps these, too, and the others read the columns that they would need,
which makes a difference of 0.003 over the steps of the test."""
CLEAR = 1e-3
"""Relative, of an input and its scaled threshold: what half-precise keys and values make of it."""
threads = pytest.mark.parametrize("threads", [1, 3])


@cache
def model(variant: str = "llama", target: float = 0.6) -> PackedModel:
    """A model whose thresholds skip about half of what may be sparse, and which says that they were made for another
    share."""
    packed = random_model(variant)
    return made_for(with_rules(packed, stock_model(packed), TEXTS[0][:13], [0, 6, 12]), target)


def made_for(packed: PackedModel, target: float) -> PackedModel:
    return replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": target}})


def everywhere(packed: PackedModel, rule: SiteRule | None) -> PackedModel:
    """The model with one rule at every site."""
    layers = tuple(
        with_sites(layer, {name: replace(site, rule=rule) for name, site in layer.sites.items()})
        for layer in packed.layers
    )
    return replace(packed, layers=layers)


def scaled(packed: PackedModel, scale: float) -> PackedModel:
    """The model with other thresholds."""
    for number, layer in enumerate(packed.layers):
        sites = {
            name: replace(site, rule=replace(site.rule, threshold=torch.tensor(scale) * site.rule.limits))
            for name, site in layer.sites.items()
            if site.rule is not None
        }
        layers = [*packed.layers]
        layers[number] = with_sites(layer, sites)
        packed = replace(packed, layers=tuple(layers))
    return packed


def skipped(packed: PackedModel, engine: Engine, before: Mapping[Any, int]) -> int:
    """The weights in inactive columns since the engine had active ones so."""
    return sum(
        site.matrix.rows * (site.matrix.columns - engine.counts().active[number, name] + before.get((number, name), 0))
        for number, layer in enumerate(packed.layers)
        for name, site in layer.sites.items()
        if site.rule is not None
    )


def trajectory(engine: Engine, ids: list[int]) -> list[float]:
    found = []
    for id in ids:
        engine.step(id)
        found.append(engine.scales[0])
    return found


class Nearest(ReferenceOperations):
    """The reference's, which keep how near any input has come to its threshold, relative to it."""

    def __init__(self) -> None:
        self.nearest = math.inf

    def collect(self, x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        self.nearest = min(self.nearest, float(((x.abs() - threshold).abs() / threshold).min()))
        return products.collect(x, threshold)


@cache
def clear_text(variant: str) -> list[int]:
    """A text of which rounding decides about no column, however its thresholds are scaled."""
    operations = Nearest()
    decoder = OperationsDecoder(model(variant), operations, torch.device("cpu"), 64, None)
    decoder.control_thresholds(new_controller(model(variant)))
    for seed in range(500):
        ids: list[int] = torch.randint(300, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoder.reset()
        operations.nearest = math.inf
        if all(decoder.step([id], True) is not None and operations.nearest > CLEAR for id in ids):
            return ids
    raise AssertionError("no text whose inputs are clear of the thresholds")


def test_the_scale_stands_still_at_the_target_and_moves_towards_it_elsewhere() -> None:
    controller = ThresholdController(0.5, 1000)
    assert controller.after(SequenceScale(), 500) == SequenceScale(1.0, 1)
    assert controller.after(SequenceScale(), 400).scale > 1 > controller.after(SequenceScale(), 600).scale


@pytest.mark.parametrize("as_it_is", [0.4, 0.46, 0.53])
def test_the_scale_is_there_within_64_tokens_and_one_token_hardly_moves_it_then(as_it_is: float) -> None:
    """A text whose share follows the logarithm of the scale as that of the books does."""
    controller, text, noise = ThresholdController(0.5, 100000), SequenceScale(), torch.Generator().manual_seed(0)
    shares, mean = [], []
    for _ in range(1024):
        mean.append(as_it_is + 0.42 * math.log(text.scale))
        shares.append(mean[-1] + 0.05 * float(torch.randn((), generator=noise)))
        text = controller.after(text, round(100000 * shares[-1]))
    assert all(abs(share - 0.5) < 0.02 for share in mean[64:])
    assert abs(sum(shares) / 1024 - 0.5) < 0.005
    assert float(torch.tensor(mean[512:]).std()) < 0.005


def test_a_target_out_of_reach_leaves_the_scale_at_its_bound_from_which_it_returns() -> None:
    controller, text = ThresholdController(0.5, 1000), SequenceScale()
    for _ in range(1000):
        text = controller.after(text, 0)
    assert text.scale == MOST_SCALE
    for _ in range(1000):
        text = controller.after(text, 1000)
    assert text.scale == LEAST_SCALE
    assert controller.after(text, 0).scale > LEAST_SCALE


@every_backend
@every_variant
def test_the_scale_follows_from_what_each_step_skipped(backend: str, variant: str) -> None:
    packed = model(variant)
    engine, controller = engine_of(packed, backend, hold=True), new_controller(packed)
    engine.prefill(TEXTS[0][:5])
    text = SequenceScale()
    assert engine.scales == (1.0,)
    for id in TEXTS[0][5:30]:
        before = engine.counts().active
        engine.step(id)
        text = controller.after(text, skipped(packed, engine, before))
        assert engine.scales[0] == pytest.approx(text.scale, abs=1e-6)
    assert text.scale > 1.02


def test_thresholds_are_multiplied_by_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model()
    for scale in (0.7, 1.3):
        start = SequenceScale(float(torch.tensor(scale)))
        monkeypatch.setattr(hold, "SequenceScale", lambda *of, start=start: SequenceScale(*of) if of else start)
        engine = Engine(packed, backend="reference", hold=True)
        other = Engine(scaled(packed, scale), backend="reference")
        assert torch.equal(engine.step(TEXTS[0][0]), other.step(TEXTS[0][0]))
        assert engine.counts() == other.counts()


@every_backend
def test_the_first_step_of_a_text_has_the_bits_of_one_without(backend: str) -> None:
    packed = model()
    engines = [engine_of(packed, backend, hold=hold) for hold in (True, False)]
    prefilled = [engine.prefill(TEXTS[0][:7]) for engine in engines]
    stepped = [engine.step(TEXTS[0][7]) for engine in engines]
    assert torch.equal(prefilled[0], prefilled[1])
    assert torch.equal(stepped[0], stepped[1])
    assert engines[1].scales == ()


@every_backend
@pytest.mark.parametrize("variant", ["llama", "qwen3, tied"])
@threads
def test_step_by_step_every_backend_does_what_the_reference_does(backend: str, variant: str, threads: int) -> None:
    packed = model(variant)
    engine, oracle = engine_of(packed, backend, hold=True, threads=threads), engine_of(packed, "reference", hold=True)
    for id in clear_text(variant):
        found, expected = engine.step(id), oracle.step(id)
        assert engine.scales == pytest.approx(oracle.scales, abs=SAME[backend])
        assert largest_difference(found, expected) < TOLERANCE[backend]
    assert oracle.scales[0] > 1.02


@every_backend_of_several_texts
@threads
def test_each_text_of_several_is_held_for_itself(backend: str, threads: int) -> None:
    packed = model()
    engine = engine_of(packed, backend, sequences=3, hold=True, threads=threads)
    oracle = engine_of(packed, "reference", sequences=3, hold=True)
    for n, length in enumerate((1, 5, 8)):
        for each in (engine, oracle):
            each.prefill(TEXTS[n][:length], n)
    for step in range(12):
        moving = [n for n in range(3) if (step + n) % 3 or step < 4]
        stood = {n: engine.scales[n] for n in range(3) if n not in moving}
        ids = [TEXTS[n][8 + step] if n in moving else None for n in range(3)]
        for each in (engine, oracle):
            each.step_all(ids)
        assert engine.scales == pytest.approx(oracle.scales, abs=STOOD[backend])
        assert stood == {n: engine.scales[n] for n in stood}
    assert len(set(engine.scales)) == 3


@every_backend_of_several_texts
def test_the_same_text_everywhere_has_the_scale_of_the_text_alone(backend: str) -> None:
    packed = model()
    alone, together = engine_of(packed, backend, hold=True), engine_of(packed, backend, sequences=3, hold=True)
    for id in TEXTS[0][:12]:
        alone.step(id)
        together.step_all([id] * 3)
        assert together.scales == pytest.approx(alone.scales * 3, abs=FLIPPED)


@every_backend
def test_a_text_begins_anew_where_it_loses_tokens_and_goes_on_elsewhere(backend: str) -> None:
    packed = model()
    engine = engine_of(packed, backend, hold=True)
    trajectory(engine, TEXTS[0][:20])
    scale = engine.scales[0]
    assert scale != 1
    engine.keep(TEXTS[0][:25])
    assert engine.scales == (scale,)
    engine.prefill(TEXTS[0][20:25])
    assert engine.scales == (scale,)
    engine.truncate(25)
    assert engine.scales == (scale,)
    engine.truncate(24)
    assert engine.scales == (1.0,)
    trajectory(engine, TEXTS[0][24:30])
    assert engine.scales != (1.0,)
    engine.reset()
    assert engine.scales == (1.0,)


@every_backend_of_several_texts
def test_of_several_texts_one_begins_anew(backend: str) -> None:
    engine = engine_of(model(), backend, sequences=2, hold=True)
    for column in zip(*TEXTS[:2], strict=True):
        engine.step_all(column)
    other = engine.scales[1]
    engine.truncate(3, 0)
    assert engine.scales == (1.0, other)
    engine.step_all([None, 7])
    assert engine.scales[0] == 1.0
    assert engine.scales[1] != other


@every_backend_of_several_texts
def test_a_copied_text_begins_anew(backend: str) -> None:
    engine = engine_of(model(), backend, sequences=2, hold=True)
    for column in zip(*TEXTS[:2], strict=True):
        engine.step_all(column)
    source = engine.scales[0]
    engine.copy(0, 1, 3)
    assert engine.scales == (source, 1.0)


@every_backend
def test_dense_steps_and_prefill_leave_the_scale(backend: str) -> None:
    engine = engine_of(model(), backend, hold=True)
    trajectory(engine, TEXTS[0][:10])
    scale = engine.scales
    engine.dense = True
    trajectory(engine, TEXTS[0][10:14])
    assert engine.scales == scale
    engine.prefill(TEXTS[0][14:20])
    assert engine.scales == scale
    engine.dense = False
    trajectory(engine, TEXTS[0][20:22])
    assert engine.scales != scale


@every_backend
def test_a_text_at_once_is_held_as_its_steps_are(backend: str) -> None:
    engine = engine_of(model(), backend, hold=True)
    expected = engine.teacher_forced(TEXTS[0][:24], 6)
    at_once = engine.scales
    engine.reset()
    engine.prefill(TEXTS[0][:6])
    found = torch.stack([engine.step(id) for id in TEXTS[0][6:24]])
    assert engine.scales == pytest.approx(at_once, abs=FLIPPED)
    assert largest_difference(found, expected[6:]) < TOLERANCE[backend]


@every_backend
def test_chosen_tokens_are_held_as_given_ones_are(backend: str) -> None:
    packed, sampler = model(), Sampler(Sampling())
    engine, other = (engine_of(packed, backend, hold=True) for _ in range(2))
    id, seen = 3, []
    for _ in range(12):
        seen.append(id)
        id = engine.decode_next(id, sampler)
    assert engine.scales == pytest.approx(trajectory(other, seen)[-1:], abs=1e-6)


@every_backend
@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        (SiteRule(torch.tensor(torch.inf)), LEAST_SCALE),
        (SiteRule(torch.tensor(-1.0)), MOST_SCALE),
        (SiteRule(torch.tensor(0.0)), MOST_SCALE),
    ],
    ids=["nothing is active", "everything is", "all but exact zeros"],
)
def test_a_target_that_no_scale_reaches_ends_at_its_bound(backend: str, rule: SiteRule, bound: float) -> None:
    packed = everywhere(model(target=0.5), rule)
    engine = engine_of(packed, backend, hold=True)
    for _ in range(2):
        engine.reset()
        found = trajectory(engine, TEXTS[0])
        assert found[-1] == bound
        assert all(torch.isfinite(torch.tensor(found)))


@every_backend
def test_the_share_that_is_skipped_comes_to_the_target(backend: str) -> None:
    for target in (0.4, 0.6):
        packed = model("llama, several bands, tied Q6_K", target)
        engine = engine_of(packed, backend, hold=True)
        trajectory(engine, TEXTS[0])
        since = engine.counts()
        trajectory(engine, TEXTS[1][:15])
        share = engine.skipped(since)
        assert share is not None
        assert share.of_sparse_sites == pytest.approx(target, abs=0.04)


def test_what_cannot_be_held_is_refused_in_a_line() -> None:
    packed = model()
    dense = everywhere(random_model(), None)
    line = "hold: the model has no thresholds that could be scaled; pack it with --calibration and --sparsity"
    for each in (dense, made_for(dense, 0.5), by_neurons(random_model("llama, one head, relu", hidden_size=256))):
        for backend in ("reference", "cpu"):
            with pytest.raises(UserError, match=line):
                engine_of(each, backend, hold=True)
    for target in (0.0, 1.0):
        with pytest.raises(UserError, match=f"hold: the model's thresholds were made for a share of {target:g}"):
            Engine(made_for(packed, target), hold=True)
    toy = replace(BACKENDS["reference"], name="toy", scales_thresholds=False)
    with pytest.raises(UserError, match="hold: the toy backend does not scale thresholds; use backend reference or"):
        check_features(toy, EngineOptions(hold=True), packed)
    with pytest.raises(UserError, match="hold: it does nothing with dense"):
        EngineOptions(hold=True, dense=True)


def test_a_model_by_neurons_is_held_where_its_attention_has_thresholds() -> None:
    ruled = random_model("llama, one head, relu", hidden_size=256)
    packed = by_neurons(made_for(with_rules(ruled, stock_model(ruled), TEXTS[0][:13], [0]), 0.6))
    packed = replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.6}})
    controller = new_controller(packed)
    sites = [site for layer in packed.layers for site in layer.attention.values() if site.rule is not None]
    assert controller.weights == sum(site.matrix.rows * site.matrix.columns for site in sites)
    scales = [trajectory(engine_of(packed, name, hold=True), TEXTS[0][:12]) for name in ("reference", "cpu")]
    assert scales[0] == pytest.approx(scales[1], abs=FLIPPED)
    assert scales[0][-1] > 1


def test_sites_that_stay_dense_in_a_sparse_model_count_with_the_target() -> None:
    """Where the table says that they may be sparse."""
    packed = model()
    rows = [{"layer": 1, "site": "mlp_in", "may_be_sparse": True}]
    table = {"sparsity": 0.6, "rows": rows}
    more = replace(packed, manifest={**packed.manifest, "thresholds": table})
    assert (1, "mlp_in") not in packed.rules
    assert new_controller(more).weights == new_controller(packed).weights + packed.parameters[1, "mlp_in"]
    assert new_controller(more).weights == sum(packed.parameters.values())

"""Models of sites within a budget: GPU and processor multiply together what has no room on the card."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from backends import largest_difference
from hybrid_decoders import EVEN, IDS, LINKS, ROUNDED, within_budget
from native_build import skip_without_kernels
from packed_models import random_model, stock_model, with_rules
from pairwise import each_value

from sparsepack.bench.decode import stored_bytes
from sparsepack.errors import PlacementError, UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Plan, plan_of_share, plan_within
from sparsepack.placement.traffic import describe_per_token, per_token
from sparsepack.progress import format_count
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.hybrid.offloaded import offloaded_matrices
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.threshold_controller import new_controller

skip_without_kernels()

NEAR = 0.01
"""Largest difference of a logit after sparse steps, whose sums have other orders. After a prefill inputs are rounded to
float16, and some columns are active that were not."""

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"intermediate_size": 1024}),  # gate and up fill whole bands, and tiles of two
    "odd": ("llama", {"intermediate_size": 701, "attention_bias": True, "mlp_bias": True, "row_scales": True}),
    "post norms": ("gemma2, soft caps", {"intermediate_size": 600}),
    "segments": ("llama, segments", {"intermediate_size": 600}),
}
OTHERS = [name for name in MODELS if name != "llama"]


@cache
def model(name: str = "llama") -> PackedModel:
    variant, changes = MODELS[name]
    packed = random_model(variant, hidden_size=512, num_hidden_layers=3, **changes)
    packed = with_rules(packed, stock_model(packed), IDS.tolist(), [0])
    return PackedModel(**{**vars(packed), "manifest": {**packed.manifest, "thresholds": {"sparsity": 0.5}}})


def where(packed: PackedModel, attention: int, gates: int, downs: int) -> Plan:
    """So many blocks of each lie on the card."""
    parts = parts_of(packed, 128, "f32")
    return replace(plan_of_share(parts, 0.0), attention=attention, gates=gates, slots=downs * parts.neurons)


@each_value({"attention, gates, downs": [(3, 3, 0), (3, 3, 2), (3, 1, 0), (1, 0, 0), (0, 0, 0)], "name": MODELS})
def test_wherever_matrices_lie_the_logits_are_the_references(
    name: str, attention: int, gates: int, downs: int, kernels: Kernels
) -> None:
    packed = model(name)
    reference, texts = Engine(packed, backend="reference"), IDS.tolist()
    engine = within_budget(packed, kernels, where(packed, attention, gates, downs))
    found = engine.teacher_forced(IDS, 0, True)
    assert largest_difference(found, reference.teacher_forced(texts, 0)) < NEAR
    for (block, site), share in reference.activity().items():
        assert engine.active()[block, site] == pytest.approx(share * len(IDS) * packed.layers[block].units[site])
    engine.reset()
    assert torch.equal(engine.teacher_forced(IDS, 0, True), found), "the same text since a reset has the same bits"
    engine.reset()
    reference.reset()
    reference.dense = True
    assert largest_difference(engine.teacher_forced(IDS, 5, False), reference.teacher_forced(texts, 5)) < ROUNDED


@pytest.mark.parametrize("bandwidth", LINKS)
def test_either_side_may_have_most_of_it(bandwidth: str, kernels: Kernels) -> None:
    packed = model("odd")
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 0)
    engine = within_budget(packed, kernels, where(packed, 0, 0, 0), LINKS[bandwidth])
    assert largest_difference(engine.teacher_forced(IDS, 0, True), expected) < NEAR
    assert bool(engine.cpu_gpu.offloaded) == (bandwidth != "bus alone")


@pytest.mark.parametrize("hold", [False, True])
def test_several_texts_leave_out_what_none_of_them_needs(hold: bool, kernels: Kernels) -> None:
    packed = model("llama")
    texts = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(4))
    engine = within_budget(packed, kernels, where(packed, 1, 1, 0), sequences=3)
    near = within_budget(packed, kernels, where(packed, 3, 3, 3), sequences=3)
    for each in (engine, near):
        if hold:
            each.control_thresholds(new_controller(packed))
    same: list[bool] = []
    units = sum(sum(layer.units.values()) for layer in packed.layers)
    for n, ids in enumerate(texts.t().tolist()):
        differences = (engine.step(ids, True) - near.step(ids, True)).abs().amax(1)
        same += (differences < NEAR).tolist()
        assert engine.scales == pytest.approx(near.scales, rel=0.02)
        counts = near.active()
        assert engine.active() == pytest.approx(counts, rel=0.02)
        assert sum(counts.values()) < 0.95 * (n + 1 if hold else 1) * units
        if not hold:
            engine.reset()
            near.reset()
    # Rounding decides about a column now and then, and what a cache has of it stays.
    assert hold or sum(same) > 0.6 * len(same)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_within_a_budget_down_matrices_leave_the_card_first(name: str, kernels: Kernels) -> None:
    packed = model(name)
    parts = parts_of(packed, 128, "f32")
    assert (parts.work.staged, parts.together) == (0, True)
    assert parts.weights == stored_bytes(packed)
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 0)
    seen = []
    for share in (0.0, 0.2, 0.5, 0.75, 0.9, 1.0):
        plan = plan_within(parts, parts.least + int(share * parts.weights))
        assert plan.card_bytes <= parts.least + share * parts.weights
        seen.append((plan.output, plan.attention, plan.gates, plan.downs))
        engine = within_budget(packed, kernels, plan)
        assert largest_difference(engine.teacher_forced(IDS, 0, True), expected) < NEAR
    assert seen == sorted(seen)
    assert seen[0] == (False, 0, 0, 0)
    assert any((attention, gates) == (3, 3) and downs < 3 for _, attention, gates, downs in seen)


def test_what_a_token_took_is_told(kernels: Kernels) -> None:
    packed = model("llama")
    plan = where(packed, 3, 2, 1)
    bandwidth = replace(EVEN, near=1e9, far_bus=1e8, far_worker=1e8)
    engine = within_budget(packed, kernels, plan, bandwidth)
    engine.teacher_forced(IDS, 5, True)
    found = per_token(engine.traffic_stats, 1e-3)
    active = {block: engine.active()[block, "mlp_mid"] for block in range(3)}
    assert found["unit"] == "columns"
    assert found["hits"] == pytest.approx(active[0] / engine.stepped)
    assert found["needed"] == pytest.approx(sum(active.values()) / engine.stepped)
    read = found["bytes"]
    down, record = sum(active.values()) / engine.stepped, plan.parts.record
    assert read["bus"] > 0
    assert read["worker"] > 0
    together = read["card"] + read["bus"] + read["worker"]
    assert together == pytest.approx(sum(plan.always_read(engine.traffic_stats.kept)) + down * record)
    assert 0.3 < engine.traffic_stats.kept < 0.9
    assert found["model"]["share"] == pytest.approx(found["model"]["together"] / 1e-3)
    assert "active columns of down matrices lay in the device's memory" in describe_per_token(found)
    assert "in the host's memory gate and up of 1 block, down of 2 blocks, links given" in engine.description
    assert f"{format_count(engine.threads, 'thread')} beside it" in engine.description


def test_a_step_after_one_that_was_interrupted_begins_anew(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model("llama")
    engine = within_budget(packed, kernels, where(packed, 1, 1, 1))
    expected = engine.step([3], True)
    engine.reset()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_launch", lambda graph, ids: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step([3], True)
        engine.cpu_gpu.worker.interrupt()
    assert torch.equal(engine.step([3], True), expected)


def test_naming_the_kernels_of_a_step_computes_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's launches are called once more to compile their kernels: what they change must be changed by kernels."""
    engine = within_budget(model("llama"), kernels, where(model("llama"), 3, 3, 0))
    engine.step([3], True)
    before = engine.cpu_gpu.mailbox.number.clone()
    with monkeypatch.context() as patch:
        for launched in ("embed", "gemv", "multiply_offloaded", "count_step", "attend", "product", "pick_likeliest"):
            patch.setattr(type(engine._kernels), launched, staticmethod(lambda *of, **more: None))
        again = within_budget(model("llama"), kernels, where(model("llama"), 3, 3, 0))
        again._step.run(True)
        assert again.cpu_gpu.mailbox.number.tolist() == [0, 0]
    assert int(before[0]) == 2, "the step that made the graph counts, and the first one"


def test_offloaded_matrices_of_one_band_are_read_over_the_bus_alone(kernels: Kernels) -> None:
    packed = random_model("llama", hidden_size=256, intermediate_size=250)
    plan = where(packed, 2, 2, 0)
    engine = within_budget(packed, kernels, plan)
    assert offloaded_matrices(packed, plan, EVEN) == []
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 5)
    assert largest_difference(engine.teacher_forced(IDS, 5, True), expected) < ROUNDED
    assert per_token(engine.traffic_stats, 1e-3)["bytes"]["worker"] == 0


def test_what_is_for_neurons_is_refused() -> None:
    from sparsepack.runtime.backends import find_backend

    packed, row = model("llama"), find_backend("cuda")
    check_features(row, EngineOptions(device="cuda", vram="8GB"), packed)
    for options in ({"policy": "static"}, {"gate_copy": 1.5}):
        with pytest.raises(UserError, match=f"{next(iter(options))}: the model's MLPs are not stored by neurons"):
            check_features(row, EngineOptions(device="cuda", vram="8GB", **options), packed)
    with pytest.raises(PlacementError, match="gate-copy: the model's MLPs are not stored by neurons"):
        parts_of(packed, 128, "f32", gate_copies=True)

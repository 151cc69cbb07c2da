"""Models of planes within a budget: the first planes on the card, the others shared by processor and bus."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hybrid_decoders import EVEN, IDS, LINKS, within_budget
from native_build import skip_without_kernels
from packed_models import random_model, stock_model, with_rules
from pairwise import each_value
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.placement.budget import Plan, plan_of_share, plan_within
from sparsepack.placement.traffic import describe_per_token, per_token
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.hybrid.offloaded import kind_of, offloaded_matrices
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.threshold_controller import new_controller

skip_without_kernels()

MULTIPLES = torch.tensor([0.5, 0.8, 1.1, 1.7, 2.6])
BLOCKS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"intermediate_size": 701, "attention_bias": True, "mlp_bias": True, "row_scales": True},
    "tails": {"intermediate_size": 350, "tails": True},
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's plain kernels do not round multipliers to 8 bits."""
    monkeypatch.setenv(machine.FORCED, "scalar")


@cache
def model(shape: str) -> PackedModel:
    """Thresholds of levels at every site but some, which have one for each column or none."""
    packed = random_model("llama", hidden_size=512, num_hidden_layers=BLOCKS, block="Q6_P", **SHAPES[shape])
    packed = with_rules(packed, stock_model(packed), IDS.tolist(), [0])
    layers = list(packed.layers)
    for number, layer in enumerate(layers):
        attention = {name: _of_levels(site, number, name) for name, site in layer.attention.items()}
        sites = {name: _of_levels(site, number, name) for name, site in layer.mlp.sites.items()}
        layers[number] = replace(layer, attention=attention, mlp=replace(layer.mlp, sites=sites))
    manifest = {**packed.manifest, "thresholds": {"sparsity": 0.4}}
    return replace(packed, layers=tuple(layers), manifest=manifest)


def _of_levels(site: Any, block: int, name: str) -> Any:
    if site.rule is None or (block, name) == (1, "attn_out"):
        return site
    threshold = site.rule.limits.reshape(-1).expand(site.matrix.columns).clone()
    threshold[::7] = torch.inf
    return replace(site, rule=SiteRule(threshold, site.rule.offset, steps=MULTIPLES))


def where(packed: PackedModel, planes: int, attention: int = 0, gates: int = 0, downs: int = 0) -> Plan:
    """So many planes on the card, and one more of so many blocks of each."""
    parts = parts_of(packed, 128, "f32")
    plan = replace(plan_of_share(parts, 0.0), attention=attention, gates=gates, slots=downs * parts.neurons)
    return replace(plan, planes=planes)


def assert_near(found: Tensor, expected: Tensor, kernels: Kernels, limit: float = 3e-3) -> None:
    """An input that rounding takes across a threshold has another level: on a GPU now and then."""
    difference = (found.cpu() - expected).norm() / expected.norm()
    assert float(difference) < (0.2 if kernels is KERNELS else limit)


@each_value(
    {
        "planes, more": [
            (0, (2, 1, 0)),
            (1, (0, 0, 0)),
            (2, (1, 3, 0)),
            (4, (2, 1, 0)),
        ],
        "shape": SHAPES,
        "bandwidth": LINKS,
    }
)
def test_wherever_planes_lie_the_logits_are_the_references(
    shape: str, planes: int, more: tuple[int, int, int], bandwidth: str, kernels: Kernels
) -> None:
    packed = model(shape)
    reference = Engine(packed, backend="reference")
    engine = within_budget(packed, kernels, where(packed, planes, *more), LINKS[bandwidth])
    assert bool(engine.cpu_gpu.offloaded) == (bandwidth != "bus alone")
    found = engine.teacher_forced(IDS, 0, True)
    assert_near(found, reference.teacher_forced(IDS.tolist(), 0), kernels)
    for (block, site), share in reference.activity().items():
        units = packed.layers[block].sites[site].matrix.units
        assert engine.active()[block, site] == pytest.approx(share * len(IDS) * units, rel=0.02)
    engine.reset()
    assert torch.equal(engine.teacher_forced(IDS, 0, True), found), "the same text since a reset has the same bits"
    engine.reset()
    reference.reset()
    reference.dense = True
    dense = engine.teacher_forced(IDS, 5, False)
    assert_near(dense, reference.teacher_forced(IDS.tolist(), 5), kernels)


def test_the_controller_holds_what_is_read(kernels: Kernels) -> None:
    packed = model("odd")
    engine = within_budget(packed, kernels, where(packed, 1, 2, 1))
    oracle = Engine(packed, context=64, backend="reference", hold=True)
    engine.control_thresholds(new_controller(packed))
    for id in IDS.tolist():
        engine.step([id], True)
        oracle.step(id)
    assert engine.scales == pytest.approx(oracle.scales, abs=0.03)
    assert abs(engine.scales[0] - 1) > 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("planes", [0, 1, 3])
def test_several_texts_read_a_column_at_the_largest_level(planes: int) -> None:
    packed = model("odd")
    engine = within_budget(packed, KERNELS, where(packed, planes, 2, 1), sequences=3)
    oracle = Engine(packed, context=64, backend="reference", sequences=3)
    ids = IDS.tolist()
    for each in zip(ids, ids[5:] + ids[:5], ids[::-1], strict=True):
        found = engine.step(list(each), True)
        expected = oracle.step_all(list(each))
        assert_near(found, expected, KERNELS)


@pytest.mark.parametrize("shape", ["tails", pytest.param("odd", marks=pytest.mark.long)])
def test_within_a_budget_last_planes_leave_the_card_first(shape: str, kernels: Kernels) -> None:
    packed = model(shape)
    parts = parts_of(packed, 128, "f32")
    expected = Engine(packed, backend="reference", dense=True).teacher_forced(IDS.tolist(), 0)
    seen = []
    for share in (0.0, 0.3, 0.55, 0.7, 0.9, 1.0):
        plan = plan_within(parts, parts.least + int(share * (parts.weights - parts.fixed)))
        assert plan.card_bytes <= plan.budget
        assert plan.card_bytes + plan.host_bytes >= parts.weights
        seen.append((plan.output, plan.planes, plan.attention, plan.gates, plan.downs))
        engine = within_budget(packed, kernels, plan)
        assert_near(engine.teacher_forced(IDS, 0, False), expected, kernels)
    assert seen == sorted(seen)
    assert seen[0] == (False, 0, 0, 0, 0)
    assert len({planes for _, planes, *_ in seen}) > 3, "most budgets end at planes of their own"
    assert plan.whole
    assert plan.host_bytes == 0


def test_what_a_token_read_where_is_told(kernels: Kernels) -> None:
    packed = model("odd")
    plan = where(packed, 1, BLOCKS, 2)
    bandwidth = replace(EVEN, near=1e9, far_bus=1e8, far_worker=1e8)
    engine = within_budget(packed, kernels, plan, bandwidth)
    engine.teacher_forced(IDS, 5, True)
    found = per_token(engine.traffic_stats, 1e-3)
    assert found["unit"] == "bytes"
    read = found["bytes"]
    matrices = {key: packed.layers[key[0]].sites[key[1]].matrix for key in engine.active()}
    bytes = sum(engine.active()[key] * -(-matrix.rows // 256) for key, matrix in matrices.items()) / engine.stepped
    always = plan.card["output"] + plan.card["keys and values"]
    assert sum(read.values()) == pytest.approx(bytes + always)
    assert read["worker"] > 0
    assert read["bus"] > 0
    # Columns have all levels: on the card is no more than the first planes of all, and less than all that is read.
    held = sum(plan.card_bytes_of(kind) for kind in plan.matrices)
    assert 0.3 * held < read["card"] - always < held
    assert found["model"]["share"] > 0
    assert "MB from the device's memory" in describe_per_token(found)
    assert "of every matrix 1 plane on the card, one more of attention of 3 blocks, gate and up of 2 blocks" in (
        engine.description
    )


def test_the_processor_has_the_rest_of_the_last_bands() -> None:
    packed = model("odd")
    for planes, more in ((0, 0), (0, 1), (2, 1), (4, 0)):
        plan = where(packed, planes, more, more, more)
        for each in offloaded_matrices(packed, plan, EVEN):
            on_card = plan.on_card(kind_of(each.name), each.block)
            assert each.first == max(on_card, 1)
            assert each.request.levels
            assert not each.request.skips
            assert each.request.rows == each.matrix.rows - 256 * each.gpu_bands == each.cpu_part.rows
            assert each.gpu_bands % each.tile_bands == 0
            assert each.request.begins == each.gpu_columns < each.matrix.columns
    names = {(each.block, each.name) for each in offloaded_matrices(packed, where(packed, 1), EVEN)}
    assert names == {(block, name) for block in range(BLOCKS) for name in ("attn_in", "mlp_in")}, "others are one tile"
    assert offloaded_matrices(packed, where(packed, 4, BLOCKS, BLOCKS, BLOCKS), EVEN) == []


def test_planes_may_be_divided() -> None:
    check_features(find_backend("cuda"), EngineOptions(device="cuda", vram="8GB"), model("odd"))


def test_the_native_kernels_add_what_the_plain_ones_do(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.FORCED)
    packed = model("odd")
    expected = Engine(packed, backend="reference", dense=True).teacher_forced(IDS.tolist(), 0)
    engine = within_budget(packed, kernels, where(packed, 1, 2, 1), LINKS["processor alone"])
    assert_near(engine.teacher_forced(IDS, 0, False), expected, kernels, 0.02)

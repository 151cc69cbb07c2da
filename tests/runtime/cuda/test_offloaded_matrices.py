"""Matrices that have no room on the card: they lie in memory of the host, and processor and bus share them."""

from dataclasses import replace

import pytest
import torch
from backends import largest_difference
from hybrid_decoders import EVEN, IDS, ROUNDED, decoder, model
from native_build import skip_without_kernels
from pairwise import each_value

from sparsepack.formats.packed import PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.placement.budget import Plan, plan_of_share, plan_within
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.offloaded import offloaded_matrices
from sparsepack.runtime.hybrid.plan import parts_of

skip_without_kernels()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 0.9, 1.0])
def test_what_has_no_room_on_the_card_lies_in_the_hosts_memory(kernels: Kernels, share: float) -> None:
    """From where nothing but keys, values and buffers lies on the card to where all does."""
    packed = model(num_hidden_layers=3)
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 5)
    parts = parts_of(packed, 128, "f32")
    plan = plan_within(parts, parts.least + int(share * parts.weights))
    engine = decoder(packed, kernels, 0.3, plan=plan)
    assert largest_difference(engine.teacher_forced(IDS, 5, True), expected) < ROUNDED


WIDE = {"intermediate_size": 1301, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def whole_in_host_memory(packed: PackedModel, attention: int, gates: int) -> Plan:
    return replace(plan_of_share(parts_of(packed, 128, "f32"), 0.0), attention=attention, gates=gates)


@each_value({"attention, gates": [(0, 0), (1, 0), (2, 1)], "hidden": [256, 512]})
def test_processor_and_bus_share_the_bands_of_offloaded_matrices(
    kernels: Kernels, hidden: int, attention: int, gates: int
) -> None:
    packed = model(**WIDE, hidden_size=hidden)
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 5)
    engine = decoder(packed, kernels, 0.0, plan=whole_in_host_memory(packed, attention, gates))
    found = engine.teacher_forced(IDS, 5, True)
    assert largest_difference(found, expected) < ROUNDED
    products = engine.cpu_gpu.mailbox.layout.products
    assert [each.block for each in products if each.columns == hidden and each.rows < 1301] == sorted(
        each.block for each in products
    )
    assert len(products) == (2 - attention) * (1 if hidden == 256 else 2) + 2 - gates
    assert 0 < engine.traffic_stats.cpu_bytes < engine.cpu_gpu._plan.always_read()[1]
    engine.reset()
    assert torch.equal(engine.teacher_forced(IDS, 5, True), found), "the same text since a reset has the same bits"


def test_several_texts_share_offloaded_matrices(kernels: Kernels) -> None:
    packed = model(**WIDE, hidden_size=512)
    texts = torch.randint(300, (3, 6), generator=torch.Generator().manual_seed(4))
    engine = decoder(packed, kernels, 0.0, plan=whole_in_host_memory(packed, 0, 0), sequences=3)
    reference = Engine(packed, backend="reference", sequences=3)
    for n, ids in enumerate(texts[:, :3]):
        assert largest_difference(engine.prefill(n, ids), reference.prefill(ids.tolist(), n)) < ROUNDED
    for ids in texts[:, 3:].t().tolist():
        assert largest_difference(engine.step(ids, True), reference.step_all(ids)) < ROUNDED


@pytest.mark.parametrize("near", [BandwidthProfile(1.0, 1e3, 1e-3), BandwidthProfile(1.0, 1e-3, 1e3)])
def test_who_is_slow_gets_few_bands_of_offloaded_matrices(near: BandwidthProfile) -> None:
    packed = model(**WIDE, hidden_size=512)
    far = offloaded_matrices(packed, whole_in_host_memory(packed, 0, 0), near)
    assert [(each.block, each.name) for each in far] == (
        [] if near.bus > 1 else [(block, name) for block in range(2) for name in ("attn_in", "attn_out", "mlp_gate")]
    )
    assert all(each.gpu_bands == 1 for each in far)


@pytest.mark.parametrize(("bands", "near", "tile_bands"), [(32, 16, 8), (20, 12, 4), (14, 8, 2), (9, 5, 1), (3, 2, 1)])
def test_whole_tiles_are_divided(bands: int, near: int, tile_bands: int) -> None:
    packed = model(**{**WIDE, "intermediate_size": 256 * bands}, hidden_size=512)
    bandwidth = BandwidthProfile(1.0, bus=1.2, worker=1.0)
    far = [
        each
        for each in offloaded_matrices(packed, whole_in_host_memory(packed, 0, 0), bandwidth)
        if each.name == "mlp_gate"
    ]
    assert [(each.gpu_bands, each.tile_bands, len(each.cpu_part.blocks)) for each in far] == [
        (near, tile_bands, bands - near)
    ] * 2


def test_columns_of_attention_with_thresholds_are_left_out_on_both_sides() -> None:
    packed = model(**WIDE, hidden_size=512)
    site = packed.layers[1].attention["attn_out"]
    ruled = replace(site, rule=SiteRule(torch.tensor([0.1])))
    layer = replace(packed.layers[1], attention={**packed.layers[1].attention, "attn_out": ruled})
    packed = replace(packed, layers=(packed.layers[0], layer))
    far = offloaded_matrices(packed, whole_in_host_memory(packed, 0, 0), EVEN)
    names = [(block, name) for block in range(2) for name in ("attn_in", "attn_out", "mlp_gate")]
    assert [(each.block, each.name) for each in far] == names
    assert [each.request.skips for each in far] == [name == (1, "attn_out") for name in names]

"""Matrices of planes by the native kernels: the reference's products, logits and counts, by every instruction set."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from model_table import VARIANTS
from native_build import instruction_set_params
from packed_models import random_model, stock_logits, stock_model, with_sites
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import ExpertMlp, PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.cpu.decoder import NativeDecoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.reference import products
from sparsepack.runtime.reference.backend import operations as reference_operations

pytestmark = [mark for parameter in instruction_set_params()[:1] for mark in parameter.marks]
IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
SHARES = (0.16, 0.3, 0.45, 0.65, 0.85)
"""Of inputs that are below the limit of each level."""

COARSE = 8e-3
"""Relative error of products whose multipliers have 8 bits."""


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-20))


@cache
def matrix(rows: int, columns: int, tail: bool, scaled: bool) -> PackedMatrix:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * (0.5 + torch.rand(columns, generator=generator))
    blocks, rest = zigzag.pack_with_tail(weight, "Q6_P") if tail else (zigzag.pack(weight, "Q6_P"), None)
    scale = 0.5 + torch.rand(rows, generator=generator) if scaled else None
    return PackedMatrix(blocks, MatrixFormat("Q6_P", "zigzag"), rows, columns, rest, scale)


@pytest.mark.parametrize("instruction_set", instruction_set_params())
@pytest.mark.parametrize(
    ("rows", "columns", "tail"),
    [(1, 5, False), (64, 33, True), (300, 70, True), (576, 257, True), (1100, 129, False), (5000, 90, True)],
)
def test_products_are_those_of_the_reference(
    instruction_set: str, rows: int, columns: int, tail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.FORCED, instruction_set)
    stored = matrix(rows, columns, tail, rows % 3 == 0)
    loaded, expected = operations.load_zigzag(stored), products.load_zigzag(stored)
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(21, columns, generator=generator)  # with more than 16 AMX multiplies level by level
    levels = (x.abs()[:, None] > torch.tensor([0.1, 0.3, 0.6, 1.2, 2.0])[:, None]).sum(1).to(torch.uint8)
    levels[1], levels[2], levels[3, ::2] = 0, 5, 5
    assert relative(operations.planes_matmul(loaded, x, levels), products.planes_matmul(expected, x, levels)) < COARSE
    for positions in (1, 8, 11):
        found = operations.zigzag_matmul(loaded, x[:positions])
        assert relative(found, products.zigzag_matmul(expected, x[:positions])) < (1e-4 if positions <= 8 else 5e-4)
    indices, count = torch.arange(0, columns, 2, dtype=torch.int32), torch.tensor((columns + 1) // 2)
    found = operations.zigzag_gemv(loaded, x[0], indices, count)
    assert relative(found, products.zigzag_gemv(expected, x[0], indices, count)) < 1e-4


def test_an_input_far_larger_than_the_others_does_not_wash_them_out() -> None:
    stored = matrix(576, 257, True, False)
    loaded, expected = operations.load_zigzag(stored), products.load_zigzag(stored)
    x = torch.randn(1, 257, generator=torch.Generator().manual_seed(2))
    for level in range(1, 6):
        levels = torch.full((1, 257), level, dtype=torch.uint8)
        alone = torch.zeros_like(x)
        x[0, 100] = alone[0, 100] = 300.0
        rest = x - alone
        found = operations.planes_matmul(loaded, x, levels) - products.planes_matmul(expected, alone, levels)
        assert relative(found, products.planes_matmul(expected, rest, levels)) < 0.03


def with_levels(packed: PackedModel, ids: list[int]) -> PackedModel:
    """Every site but one with thresholds of levels, one with one threshold and one with one for each column. At
    mlp_mid experts have levels each."""
    inputs = stock_logits(stock_model(packed), packed, ids, 0)[1].inputs
    layers = [*packed.layers]
    generator = torch.Generator().manual_seed(3)
    for number, ((layer, site), x) in enumerate(sorted(inputs.items())):
        sizes, mlp = x.abs(), layers[layer].mlp
        own = isinstance(mlp, ExpertMlp) and site == "mlp_mid"
        shape = (mlp.sites[site].matrix.experts, x.shape[-1]) if own else (x.shape[-1],)
        steps = sizes.flatten().quantile(torch.tensor(SHARES))
        threshold = 0.7 + 0.6 * torch.rand(shape, generator=generator)
        whole = {0: None, 3: SiteRule(steps[1]), 4: SiteRule(steps[1] * threshold)}
        rule = whole.get(number, SiteRule(threshold, steps=steps))
        of_site = layers[layer].sites[site]
        layers[layer] = with_sites(layers[layer], {site: dataclasses.replace(of_site, rule=rule)})
    return dataclasses.replace(packed, layers=tuple(layers))


@cache
def model(variant: str, **changes: Any) -> PackedModel:
    return with_levels(random_model(variant, block="Q6_P", tails=True, **changes), IDS)


def reference_decoder(packed: PackedModel) -> OperationsDecoder:
    """The reference with keys and values rounded as the kernels round them: they may cross a threshold."""
    return OperationsDecoder(packed, reference_operations, torch.device("cpu"), 64, None, "f16")


ROUNDED = 0.08
"""Relative error of logits of a random model: an input that rounding takes across a threshold has another level."""

WIDE = {"hidden_size": 320, "intermediate_size": 1100, "row_scales": True}
VARIANT, BIASES = "llama", "llama tied, biases, llama3 rotary"
assert {VARIANT, BIASES} <= set(VARIANTS)


@pytest.mark.parametrize("instruction_set", instruction_set_params())
@pytest.mark.parametrize(("variant", "changes", "threads"), [(VARIANT, {}, 1), (BIASES, {}, 2), (VARIANT, WIDE, 2)])
def test_logits_and_counts_are_those_of_the_reference(
    instruction_set: str, variant: str, changes: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.FORCED, instruction_set)
    packed = model(variant, **changes)
    reference = reference_decoder(packed)
    expected = reference.teacher_forced(torch.tensor(IDS), 4, True)
    decoder = NativeDecoder(packed, torch.device("cpu"), 64, threads)
    found = decoder.teacher_forced(torch.tensor(IDS), 4, True)
    assert relative(found, expected) < (1e-3 if instruction_set == "scalar" else ROUNDED)
    counts = decoder.active()
    for key, count in reference.active().items():
        assert counts[key] == pytest.approx(int(count), rel=0.001 if instruction_set == "scalar" else 0.03)
    dense = Engine(packed, context=64, backend="cpu", threads=threads, dense=True)
    expected = Engine(packed, context=64, backend="reference", dense=True).teacher_forced(IDS, 4)
    assert relative(dense.teacher_forced(IDS, 4), expected) < 5e-3
    assert set(dense.activity().values()) == {1.0}


def test_several_sequences_read_a_column_at_the_level_of_its_largest_input() -> None:
    packed = model(VARIANT, **WIDE)
    logits = []
    for backend in ("reference", "cpu"):
        engine = Engine(packed, context=64, backend=backend, sequences=3)
        for sequence in range(3):
            engine.prefill(IDS[sequence : sequence + 5], sequence)
        steps = [engine.step_all([5, 6, 7]), engine.step_all([8, None, 9]), engine.step_all([3, 4, 5])]
        logits.append((torch.cat([each[[0, 2]] for each in steps]), dict(engine.activity())))
    assert relative(logits[1][0], logits[0][0]) < ROUNDED
    assert logits[1][1] == pytest.approx(logits[0][1], abs=0.02)


def test_the_controller_scales_thresholds_of_levels() -> None:
    packed = model(VARIANT, **WIDE)
    packed = dataclasses.replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.5}})
    scales = []
    for backend in ("reference", "cpu"):
        engine = Engine(packed, context=64, backend=backend, hold=True)
        engine.prefill(IDS[:3])
        for id in IDS[3:]:
            engine.step(id)
        scales.append(engine.scales[0])
    assert scales[0] != 1
    assert scales[1] == pytest.approx(scales[0], abs=0.002)


def test_the_same_bits_every_run() -> None:
    packed = model(VARIANT, **WIDE)

    def run(threads: int) -> Tensor:
        return Engine(packed, context=64, backend="cpu", threads=threads).teacher_forced(IDS, 3)

    for threads in (1, 3):
        assert torch.equal(run(threads), run(threads))


@pytest.mark.parametrize("tails", [False, True])
def test_experts_read_whole_columns(tails: bool) -> None:
    packed = random_model(
        VARIANT, block="Q6_P", tails=tails, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2
    )
    expected = Engine(packed, context=64, backend="reference").teacher_forced(IDS, 4)
    assert relative(Engine(packed, context=64, backend="cpu").teacher_forced(IDS, 4), expected) < 0.01
    sites = dict(packed.layers[0].sites)
    rules = {name: SiteRule(torch.tensor(0.3)) for name in ("mlp_in", "mlp_mid")}
    changed = {name: dataclasses.replace(sites[name], rule=rule) for name, rule in rules.items()}
    some = dataclasses.replace(packed, layers=(with_sites(packed.layers[0], changed), *packed.layers[1:]))
    expected = Engine(some, context=64, backend="reference").teacher_forced(IDS, 4)
    assert relative(Engine(some, context=64, backend="cpu").teacher_forced(IDS, 4), expected) < 0.01


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 300, "head_dim": 16},
    "olmoe": {"intermediate_size": 43, "num_experts": 5, "num_experts_per_tok": 1, "pad_token_id": None},
    "qwen2_moe": {
        "moe_intermediate_size": 43,
        "shared_expert_intermediate_size": 86,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("instruction_set", instruction_set_params())
@pytest.mark.parametrize(("family", "threads"), [("mixtral", 1), ("qwen3_moe", 2), ("olmoe", 3), ("qwen2_moe", 2)])
def test_experts_read_columns_at_the_levels_of_their_inputs(
    instruction_set: str, family: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.FORCED, instruction_set)
    packed = model(VARIANT, model_type=family, **EXPERTS[family])
    assert any(site.rule and site.rule.limits.dim() == 3 for layer in packed.layers for site in layer.sites.values())
    reference = reference_decoder(packed)
    expected = reference.teacher_forced(torch.tensor(IDS), 4, True)
    decoder = NativeDecoder(packed, torch.device("cpu"), 64, threads)
    found = decoder.teacher_forced(torch.tensor(IDS), 4, True)
    exact = instruction_set == "scalar"
    assert relative(found, expected) < (1e-3 if exact else ROUNDED)
    counts = decoder.active()
    for key, count in reference.active().items():
        assert counts[key] == pytest.approx(int(count), rel=0.001 if exact else 0.03)
    dense = Engine(packed, context=64, backend="cpu", threads=threads, dense=True)
    expected = Engine(packed, context=64, backend="reference", dense=True).teacher_forced(IDS, 4)
    assert relative(dense.teacher_forced(IDS, 4), expected) < 5e-3
    assert set(dense.activity().values()) == {1.0}


def test_several_sequences_and_the_controller_have_experts_with_levels() -> None:
    packed = model(VARIANT, model_type="qwen2_moe", **EXPERTS["qwen2_moe"])
    packed = dataclasses.replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.5}})
    found = []
    for backend in ("reference", "cpu"):
        engine = Engine(packed, context=64, backend=backend, sequences=3, hold=True)
        for sequence in range(3):
            engine.prefill(IDS[sequence : sequence + 5], sequence)
        steps = [engine.step_all([5, 6, 7]), engine.step_all([8, None, 9]), engine.step_all([3, 4, 5])]
        found.append((torch.cat([each[[0, 2]] for each in steps]), dict(engine.activity()), engine.scales))
    assert relative(found[1][0], found[0][0]) < ROUNDED
    assert found[1][1] == pytest.approx(found[0][1], abs=0.02)
    assert found[1][2] == pytest.approx(found[0][2], abs=0.002)
    assert 1.0 not in found[0][2]


def test_thresholds_of_other_experts_are_refused() -> None:
    packed = model(VARIANT, model_type="mixtral", **EXPERTS["mixtral"])
    layer = packed.layers[1]
    site = layer.sites["mlp_mid"]
    assert site.rule is not None
    fewer = dataclasses.replace(site, rule=SiteRule(site.rule.limits[1:]))
    wrong = dataclasses.replace(packed, layers=(packed.layers[0], with_sites(layer, {"mlp_mid": fewer})))
    with pytest.raises(ValueError, match="expected one threshold, or one per column"):
        NativeDecoder(wrong, torch.device("cpu"), 64, 1)


def test_thresholds_that_fall_are_refused() -> None:
    packed = model(VARIANT)
    layer = packed.layers[1]
    name, site = next((name, site) for name, site in layer.sites.items() if site.rule and site.rule.of_levels)
    assert site.rule is not None
    assert site.rule.steps is not None
    falling = dataclasses.replace(site, rule=dataclasses.replace(site.rule, steps=site.rule.steps.flip(0)))
    wrong = dataclasses.replace(packed, layers=(packed.layers[0], with_sites(layer, {name: falling})))
    with pytest.raises(ValueError, match="steps fall from level to level"):
        NativeDecoder(wrong, torch.device("cpu"), 64, 1)


def test_bad_lists_of_levels_are_refused() -> None:
    loaded = operations.load_zigzag(matrix(64, 33, True, False))
    x, y = torch.zeros(33).numpy(), torch.zeros(64).numpy()
    for indices, ends in (([3, 2], [2, 2, 2, 2]), ([3, 33], [0, 0, 0, 0]), ([1, 2], [1, 0, 2, 2]), ([1], [0, 0, 0, 2])):
        lists = [torch.tensor(each, dtype=torch.int32).numpy() for each in (indices, ends)]
        with pytest.raises(ValueError, match="expected ascending"):
            machine.operations().planes_gemv(loaded, x, *lists, y)

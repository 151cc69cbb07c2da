"""Engines on mixtures of experts, against the stock model: routing and skipping inside the experts compound."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from backends import SHARE, TOLERANCE, engine_of, every_backend_that, largest_difference
from model_table import DELTA_MIXTURE, GPT_OSS, LATENTS, LFM2_MOE, NEMOTRON_H
from packed_models import (
    random_model,
    stock_logits,
    stock_model,
    with_rules,
    with_sites,
)
from rounding import check_logits

from sparsepack.bench.decode import bytes_per_token, parameters
from sparsepack.errors import UserError
from sparsepack.formats.kinds import EXPERTS
from sparsepack.formats.packed import ExpertMlp, PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.runtime.backends import BACKENDS, ROW_NORMS, SHARED_EXPERTS, traits_of
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference.products import route

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
QWEN = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe, odd width": {**QWEN, "moe_intermediate_size": 43, "head_dim": 24},
    "qwen3_moe, weights as they are": {
        **QWEN,
        "norm_topk_prob": False,
        "moe_intermediate_size": 300,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "head_dim": 8,
    },
    "mixtral, one expert for a token": {
        "model_type": "mixtral",
        "intermediate_size": 72,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": 5,
    },
    "qwen3_moe, many experts": {
        **QWEN,
        "num_experts": 40,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 256,
        "head_dim": 16,
    },
    "mixtral, all experts": {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
    },
    "olmoe, grouped queries": {
        "model_type": "olmoe",
        "intermediate_size": 43,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
    "qwen2_moe, a shared expert": {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 43,
        "shared_expert_intermediate_size": 86,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "gpt_oss, sinks, windows, yarn": GPT_OSS,
    "gpt_oss, wide, every head with keys of its own": {
        "model_type": "gpt_oss",
        "hidden_size": 320,
        "intermediate_size": 300,
        "num_key_value_heads": 8,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "head_dim": 64,
        "sliding_window": 7,
        "pad_token_id": 0,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2_moe, a shared expert as wide as the others": {
        "model_type": "qwen2_moe",
        "hidden_size": 256,
        "moe_intermediate_size": 300,
        "shared_expert_intermediate_size": 300,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
    "qwen3.5_moe, states": {**DELTA_MIXTURE, "num_experts": 4, "num_experts_per_tok": 1},
    "qwen3_next, states, weights as they are": {
        **DELTA_MIXTURE,
        "model_type": "qwen3_next",
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "deepseek_v3, latents, groups, yarn": {
        "model_type": "deepseek_v3",
        **LATENTS,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "seed": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 8,
        },
    },
    "deepseek_v2, latents of keys and values alone, one group": {
        "model_type": "deepseek_v2",
        **LATENTS,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "seed": 3,
    },
    "deepseek_v2, the best group, wide values": {
        "model_type": "deepseek_v2",
        **LATENTS,
        "v_head_dim": 22,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 8,
        },
    },
    "glm4_moe_lite, latents, dense between mixtures": {
        "model_type": "glm4_moe_lite",
        **LATENTS,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "seed": 3,
    },
    "lfm2_moe, short convolutions, sigmoids": LFM2_MOE,
    "nemotron_h, state-space models, plain experts": NEMOTRON_H,
    "nemotron_h, groups of experts, a dense MLP first": {
        **NEMOTRON_H,
        "layers_block_type": ["mlp", "moe", "full_attention", "linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "conv_kernel": 3,
        "intermediate_size": 30,
        "moe_shared_expert_intermediate_size": 43,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
}

every_backend = every_backend_that(lambda row: EXPERTS in row.mlps)


@cache
def models(variant: str, rules: bool = False) -> tuple[PackedModel, Any]:
    packed = random_model(**VARIANTS[variant])
    stock = stock_model(packed)
    return (with_rules(packed, stock, IDS, [0, 6]) if rules else packed), stock


def experts_of(packed: PackedModel, layer: int = 0) -> ExpertMlp:
    mlp = packed.layers[layer].mlp
    assert isinstance(mlp, ExpertMlp)
    return mlp


@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_logits_are_those_of_the_stock_model(backend: str, variant: str) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, len(IDS))
    engine = engine_of(packed, backend)
    whole, masked = engine.teacher_forced(IDS, len(IDS)), engine_of(packed, backend).teacher_forced(IDS, 0)
    engine.reset()
    for found in (whole, masked, torch.stack([engine.step(id) for id in IDS])):
        check_logits(found, expected, backend, packed, IDS, len(IDS))
    assert set(engine.activity().values()) == {1.0}


def test_the_reference_is_within_a_ten_thousandth_of_the_stock_model() -> None:
    for variant in VARIANTS:
        packed, stock = models(variant)
        expected, _ = stock_logits(stock, packed, IDS, len(IDS))
        found = engine_of(packed, "reference").teacher_forced(IDS, len(IDS))
        assert largest_difference(found, expected) < 1e-4 * float(expected.abs().max())


@every_backend
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_skipping_is_the_stock_models_with_sparse_inputs(backend: str, variant: str, start: int) -> None:
    packed, stock = models(variant, rules=True)
    expected, watch = stock_logits(stock, packed, IDS, start)
    engine = engine_of(packed, backend)
    check_logits(engine.teacher_forced(IDS, start), expected, backend, packed, IDS, start)
    activity = engine.activity()
    for (layer, site), x in watch.inputs.items():
        rule = packed.layers[layer].sites[site].rule
        if rule is not None:
            d = x if rule.offset is None else x - rule.offset
            active = float((d.abs() > rule.limits).double().mean())
            assert activity[layer, site] == pytest.approx(active, abs=SHARE[backend])
    engine.reset()
    engine.prefill(IDS[:start]) if start else None
    steps = torch.stack([engine.step(id) for id in IDS[start:]])
    check_logits(steps, expected[start:], backend, packed, IDS, start)


OF_EACH_KIND = (
    "qwen3_moe, odd width",
    "olmoe, grouped queries",
    "qwen2_moe, a shared expert",
    "deepseek_v3, latents, groups, yarn",
    "deepseek_v2, latents of keys and values alone, one group",
)


@every_backend
@pytest.mark.parametrize("variant", [*OF_EACH_KIND, "mixtral, one expert for a token"])
def test_greedy_tokens_are_the_stock_models(backend: str, variant: str) -> None:
    changes = {**VARIANTS[variant], "max_position_embeddings": 300, "seed": 5}
    packed = random_model(**changes)
    stock = stock_model(packed)
    engine = engine_of(packed, backend)
    ids = IDS[:4]
    logits, agreed = engine.prefill(ids), 0
    with torch.inference_mode():
        expected = stock(torch.tensor([ids]), use_cache=True)
        for _ in range(96):
            row = expected.logits[0, -1]
            top = row.topk(2)
            if float(top.values[0] - top.values[1]) > TOLERANCE[backend]:  # a nearer second may win by roundings
                assert int(logits.argmax()) == int(top.indices[0])
                agreed += 1
            id = int(top.indices[0])
            logits = engine.step(id)
            expected = stock(torch.tensor([[id]]), past_key_values=expected.past_key_values, use_cache=True)
    assert agreed > 75


STEPS = [
    [[7, 11, 13], [2, 250, 31]],
    [[40, 3, 77], [5, 120, 9]],
    [[201, 60, 18], [33, 8, 290]],
    [[91, 17, 4], [150, 22, 63]],
]
"""Tokens that three texts go on with, in two steps, each time anew."""


@every_backend
@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("variant", OF_EACH_KIND)
def test_several_texts_have_what_each_has_alone(backend: str, variant: str, rules: bool) -> None:
    packed, _ = models(variant, rules)
    for number, layer in enumerate(packed.layers):  # attention reads what is active in any text, as dense MLPs do
        of_all = layer.attention if isinstance(layer.mlp, ExpertMlp) else layer.sites
        dense = {name: replace(site, rule=None) for name, site in of_all.items()}
        layers = [*packed.layers]
        layers[number] = with_sites(layer, dense)
        packed = replace(packed, layers=tuple(layers))
    texts = [IDS[:4], IDS[3:9], IDS[8:]]
    near = [0, 0, 0]
    for steps in STEPS:
        together, alone = engine_of(packed, backend, sequences=3), engine_of(packed, backend)
        for number, text in enumerate(texts):
            together.prefill(text, number)
        found = torch.stack([together.step_all(ids) for ids in steps])
        for number, text in enumerate(texts):
            alone.reset()
            alone.prefill(text)
            expected = torch.stack([alone.step(ids[number]) for ids in steps])
            near[number] += largest_difference(found[:, number], expected) < TOLERANCE[backend]
    # Kernels that round may move an input over its threshold or choose another expert, now in one text, now in another.
    assert min(near) >= len(STEPS) - (backend != "reference"), near


@every_backend
@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (1e30, 0.0)])
def test_all_columns_and_none(backend: str, threshold: float, share: float) -> None:
    packed, stock = models("qwen3_moe, odd width")
    layer = packed.layers[1]
    rule = SiteRule(torch.tensor(threshold))
    changed = {name: replace(layer.sites[name], rule=rule) for name in ("mlp_in", "mlp_mid")}
    packed = replace(packed, layers=(packed.layers[0], with_sites(layer, changed)))
    expected, _ = stock_logits(stock, packed, IDS, 0)
    engine = engine_of(packed, backend)
    found = torch.stack([engine.step(id) for id in IDS])
    assert largest_difference(found, expected) < TOLERANCE[backend]
    activity = engine.activity()
    assert activity[1, "mlp_in"] == share
    assert activity[1, "mlp_mid"] == pytest.approx(share, abs=1e-3)
    assert activity[0, "mlp_in"] == 1


@every_backend
@pytest.mark.parametrize("variant", OF_EACH_KIND)
def test_a_held_share_scales_thresholds_inside_experts(backend: str, variant: str) -> None:
    packed, _ = models(variant, rules=True)
    packed = replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.7}})
    engine = engine_of(packed, backend, hold=True)
    for id in IDS * 4:
        engine.step(id)
    (scale,) = engine.scales
    assert scale > 1.03  # half would be skipped by the thresholds as they are


def test_bytes_of_a_token_are_those_of_its_experts() -> None:
    packed, _ = models("qwen3_moe, odd width")
    mlp = experts_of(packed)
    all_of = sum(matrix.blocks.nbytes for layer in packed.layers for matrix in layer.mlp.matrices.values())
    dense = bytes_per_token(packed, {})
    only = {(layer, name): 0.0 for layer in range(2) for name in ("mlp_in", "mlp_mid")}
    assert dense - bytes_per_token(packed, only) == pytest.approx(all_of * 2 / 8)
    assert packed.parameters[0, "mlp_in"] == 2 * 86 * 64
    weights = sum(parameter.numel() for parameter in models("qwen3_moe, odd width")[1].parameters())
    assert parameters(packed) == weights
    assert mlp.units == {"mlp_in": 2 * 64, "mlp_mid": 2 * 43}


def test_bytes_of_a_token_have_the_shared_expert_in_them() -> None:
    packed, stock = models("qwen2_moe, a shared expert")
    all_of = sum(matrix.blocks.nbytes for layer in packed.layers for matrix in layer.mlp.matrices.values())
    only = {(layer, name): 0.0 for layer in range(2) for name in ("mlp_in", "mlp_mid")}
    assert bytes_per_token(packed, {}) - bytes_per_token(packed, only) == pytest.approx(all_of * (2 + 2) / (6 + 2))
    assert packed.parameters[0, "mlp_in"] == (2 + 2) * 86 * 64
    assert parameters(packed) == sum(parameter.numel() for parameter in stock.parameters())


def ordered(chosen: torch.Tensor, weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where the experts of each token stand by their numbers, beside these and beside their weights."""
    return [(chosen.argsort(1), chosen), (chosen.argsort(1), weights)]


def test_the_router_chooses_as_the_stock_one() -> None:
    for variant in VARIANTS:
        packed, stock = models(variant)
        layer = next(n for n, each in enumerate(packed.layers) if isinstance(each.mlp, ExpertMlp))
        block, names = stock.model.layers[layer], packed.architecture.family(layer).experts
        mlp, router = experts_of(packed, layer), block.get_submodule(names.router)
        x = torch.randn(9, packed.architecture.hidden)
        _, weights, chosen = router(x, mlp.correction) if "lfm2" in variant else router(x)
        how = mlp.used, mlp.normalised, mlp.router_bias, mlp.routing, mlp.correction
        found, of_found = (each.gather(1, chosen_at) for chosen_at, each in ordered(*route(x, mlp.router, *how)))
        chosen, weights = (each.gather(1, chosen_at) for chosen_at, each in ordered(chosen, weights))
        assert torch.equal(found, chosen)
        assert torch.allclose(of_found, weights)


def test_backends_without_experts_say_who_has_them() -> None:
    packed, _ = models("qwen3_moe, odd width")
    for row in BACKENDS.values():
        if EXPERTS not in row.mlps:
            with pytest.raises(UserError, match=f"the {row.name} backend does not run models by experts; use backend"):
                check_features(row, EngineOptions(), packed)


@pytest.mark.parametrize(
    ("variant", "trait"), [("olmoe, grouped queries", ROW_NORMS), ("qwen2_moe, a shared expert", SHARED_EXPERTS)]
)
def test_backends_that_do_not_compute_all_of_a_family_say_what_they_lack(variant: str, trait: str) -> None:
    packed, _ = models(variant)
    assert traits_of(packed.architecture, 64) == [trait]
    for row in BACKENDS.values():
        lacking = replace(row, mlps=frozenset((EXPERTS,)), traits=row.traits - {trait})
        with pytest.raises(UserError, match=re.escape(f"does not compute all of this model ({trait}); use backend")):
            check_features(lacking, EngineOptions(), packed)

"""The cuda decoder on mixtures of experts, its kernels in plain torch on the CPU, against the reference."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import simulated
import torch
from backends import largest_difference
from model_table import DELTA_MIXTURE, GPT_OSS, LATENTS, LFM2_MOE, NEMOTRON_H
from packed_models import (
    random_model,
    stock_model,
    with_levels,
    with_rules,
)
from pairwise import each_value
from simulated_decoders import IDS, ROUNDED, check_prefill, check_steps, counts, decoder
from sparse_decoders import CONTEXT, assert_near, oracle, policy_from, sparse_model

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.attention.kv_cache import CudaDoubleSparsityKvCache
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.cuda.decoder import prefill
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.decoder import kept_latents
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.threshold_controller import new_controller

pytestmark = pytest.mark.usefixtures("simulated_launches")

QWEN3: dict[str, Any] = {"model_type": "qwen3_moe", "head_dim": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "odd width": {
        **QWEN3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 43,
    },
    "gate beside up, weights as they are": {
        **QWEN3,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "moe_intermediate_size": 256,
    },
    "one expert for a token": {**QWEN3, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 72},
    "all experts": {**QWEN3, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 256},
    "olmoe": {"model_type": "olmoe", "intermediate_size": 43, "num_experts": 5, "num_experts_per_tok": 2},
    "olmoe, biases": {
        "model_type": "olmoe",
        "intermediate_size": 256,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 43,
        "shared_expert_intermediate_size": 129,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe, gate beside up": {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
}
TOO_FEW = "nemotron_h, too few blocks for flags"
VARIANTS |= {
    "gpt_oss": GPT_OSS,
    "states": {**DELTA_MIXTURE, "num_experts": 4, "num_experts_per_tok": 1},
    "lfm2_moe": LFM2_MOE,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h, one kind after itself": {
        **NEMOTRON_H,
        "layers_block_type": [
            *("mlp", "mlp", "linear_attention", "linear_attention", "full_attention"),
            *("full_attention", "moe", "moe", "linear_attention", "moe"),
        ],
    },
    "nemotron_h, whole bands": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "seed": 4,
    },
    TOO_FEW: {**NEMOTRON_H, "layers_block_type": ["full_attention", "moe"]},
    "deepseek_v3, groups, dense first": {
        "model_type": "deepseek_v3",
        **LATENTS,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "seed": 3,
    },
    "deepseek_v2, queries without latents": {
        "model_type": "deepseek_v2",
        **LATENTS,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "seed": 1,
    },
    "deepseek_v2, wide values": {
        "model_type": "deepseek_v2",
        **LATENTS,
        "v_head_dim": 22,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "glm4_moe_lite, dense between": {
        "model_type": "glm4_moe_lite",
        **LATENTS,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "moe_intermediate_size": 256,
    },
    "gpt_oss, gate beside up": {**GPT_OSS, "intermediate_size": 256, "num_local_experts": 3},
}


@cache
def model(variant: str, rules: bool = False, levels: bool = False, planes: bool = False) -> PackedModel:
    packed = random_model(**VARIANTS[variant], **({"block": "Q6_P", "tails": True} if levels or planes else {}))
    if levels:
        return with_levels(packed)
    return with_rules(packed, stock_model(packed), IDS.tolist(), [0]) if rules else packed


@each_value({"variant": VARIANTS, "rules": [False, True]})
def test_steps_compute_and_count_what_the_reference_does(variant: str, rules: bool) -> None:
    packed = model(variant, rules)
    check_steps(packed)


UNLIKE = (
    "odd width",
    "gate beside up, weights as they are",
    "olmoe, biases",
    "states",
    "nemotron_h, one kind after itself",
    "deepseek_v3, groups, dense first",
    "gpt_oss, gate beside up",
)


@pytest.mark.parametrize(
    ("variant", "planes"),
    [
        pytest.param(name, planes, marks=[pytest.mark.long][: name not in UNLIKE or n % 2 != planes])
        for n, name in enumerate(VARIANTS)
        for planes in (False, True)
    ],
)
def test_short_prompts_that_come_again_are_recorded(
    variant: str, planes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = model(variant, planes=planes)
    engine, alone = decoder(packed), decoder(packed)
    monkeypatch.setattr(alone._prefill, "_longest", 0)
    for length in (9, 13, 1, 9):
        engine.reset()
        alone.reset()
        expected = alone.prefill(0, IDS[:length])
        assert largest_difference(engine.prefill(0, IDS[:length]), expected) < ROUNDED


@pytest.mark.parametrize("rooms", [(1,), (1, 16)])
def test_experts_that_have_more_positions_than_room_are_computed_again(
    rooms: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_ROOMS", rooms)
    packed = model("olmoe", planes=True)
    engine, alone, ids = decoder(packed), decoder(packed), torch.full((50,), 7)
    monkeypatch.setattr(alone._prefill, "_longest", 0)
    expected = alone.prefill(0, ids)
    for _ in range(4):
        engine.reset()
        assert largest_difference(engine.prefill(0, ids), expected) < ROUNDED
    assert [bool(made.filled.missed) for made in engine._prefill._prompts.values()] == [True, False][: len(rooms)]


def test_a_mixture_as_the_first_block_is_refused_in_one_line() -> None:
    kinds = ["moe", "full_attention", "linear_attention"]
    with pytest.raises(
        UserError, match=r"a mixture of experts as the first block: .*use the reference backend"
    ) as told:
        decoder(random_model(**{**NEMOTRON_H, "layers_block_type": kinds}))
    assert "\n" not in str(told.value)


# Steps of TOO_FEW are those of several sequences.
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.long][: name not in UNLIKE]) for name in VARIANTS if name != TOO_FEW],
)
def test_steps_read_columns_of_experts_at_the_levels_of_their_inputs(variant: str) -> None:
    check_steps(model(variant, levels=True))


@each_value({"variant": VARIANTS, "chunk, room": [(2048, 1 << 28), (4, 2 * 64 * 1024)], "planes": [False, True]})
def test_prefill_computes_what_the_reference_computes(
    variant: str, chunk: int, room: int, planes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is room for few experts at a time; those of planes are decoded before they are multiplied."""
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", chunk)
    monkeypatch.setattr(zigzag, "SCRATCH_BYTES", room)
    check_prefill(model(variant, planes=planes))


@each_value(
    {
        "variant": [
            "odd width",
            "gate beside up, weights as they are",
            "lfm2_moe",
            "nemotron_h",
            "nemotron_h, one kind after itself",
            "deepseek_v3, groups, dense first",
            "deepseek_v2, queries without latents",
        ],
        "sequences": [2, 5, 8],
        "sparse": [True, False],
        "rules": [True, False],
    }
)
def test_several_texts_have_their_own_experts(variant: str, sequences: int, sparse: bool, rules: bool) -> None:
    packed = model(variant, rules=rules)
    bound = 2e-2 if kept_latents(packed, find_backend("cuda")) is not None else 1e-3
    texts = torch.randint(300, (sequences, 5), generator=torch.Generator().manual_seed(2))
    engine, reference = decoder(packed, sequences), Engine(packed, backend="reference", sequences=sequences)
    reference.dense = not sparse
    for ids in texts.t().tolist():
        assert largest_difference(engine.step(ids, sparse), reference.step_all(ids)) < bound
    found, expected = engine.active(), counts(reference, 5)
    assert found == pytest.approx(expected, abs=5)  # the reference cuts the mean over texts off at each step


@pytest.mark.parametrize("sequences", [1, 2])
def test_sparse_attention_takes_queries_and_keys_that_are_normed_over_all_heads(sequences: int) -> None:
    packed = sparse_model("llama", policy_from(8), **VARIANTS["olmoe"])
    cache, theirs = CudaDoubleSparsityKvCache, oracle(packed)
    ours = CudaDecoder(packed, torch.device("cuda"), CONTEXT, sequences, "f32", simulated.KERNELS, cache)
    for id in IDS.tolist():
        (expected,) = theirs.step([id], True)
        for row in ours.step([id] * sequences, True):
            assert_near(row, expected)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_held_share_scales_thresholds_as_the_reference_does(sequences: int) -> None:
    packed = model("gate beside up, weights as they are", rules=True)
    packed = replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.7}})
    engine, reference = decoder(packed, sequences), Engine(packed, backend="reference", sequences=sequences, hold=True)
    engine.control_thresholds(new_controller(packed))
    texts = torch.randint(300, (sequences, 8), generator=torch.Generator().manual_seed(3))
    for ids in texts.t().tolist():
        assert largest_difference(engine.step(ids, True), reference.step_all(ids)) < 1e-3
        assert engine.scales == pytest.approx(reference.scales)
    assert min(engine.scales) > 1.01  # half would be skipped by the thresholds as they are


def test_a_step_ahead_is_the_step_that_is_asked_for() -> None:
    packed = model("gate beside up, weights as they are", rules=True)
    engine, reference = decoder(packed), Engine(packed, backend="reference")
    sampler, chosen = Sampler(Sampling()), [int(IDS[0])]
    for _ in range(8):
        (id,) = engine.decode_next([chosen[-1]], True, [sampler])
        assert id is not None
        chosen.append(id)
    expected = reference.teacher_forced(chosen[:-1], 0)
    assert chosen[1:] == expected.argmax(-1).tolist()
    assert engine.active() == pytest.approx(counts(reference, 8))

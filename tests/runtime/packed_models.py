"""Random models of every family, packed in memory, beside the stock model with the same weights."""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, PackedMatrix, decode_matrix
from sparsepack.formats.orders import neuron as neurons
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import (
    DenseMlp,
    ExpertMlp,
    NeuronMlp,
    PackedExpertsSite,
    PackedLayer,
    PackedModel,
    PackedPerLayer,
    PackedPerLayerInputs,
    PackedSite,
)
from sparsepack.formats.stock import dequantised
from sparsepack.models.checkpoint.experts import as_experts
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import MLP_SITES
from sparsepack.models.found import family_of_config
from sparsepack.models.hf_config import architecture_of, per_layer_width, state_layers
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import build_model, parameter_shapes
from sparsepack.models.sites import SiteRule, sparsify

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE_4: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 104,
    "num_local_experts": 0,
    "layer_types": ["full_attention", "full_attention"],
    "mamba_n_heads": 1,
    "time_step_limit": None,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.6,
    "tie_word_embeddings": True,
}

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "intermediate_size": 43,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 12,
    "sliding_window": 5,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "truncate": False,
        "original_max_position_embeddings": 8,
    },
}
DELTA_NETS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
DELTA_MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    **DELTA_NETS,
    "moe_intermediate_size": 43,
    "shared_expert_intermediate_size": 43,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
LATENTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "q_lora_rank": 44,
    "kv_lora_rank": 36,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "moe_intermediate_size": 43,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
LFM2_MOE: dict[str, Any] = {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "moe_intermediate_size": 43,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 14,
    "conv_kernel": 4,
    "chunk_size": 8,
    "time_step_limit": [0.0, 1e9],
    "intermediate_size": 90,
    "moe_intermediate_size": 43,
    "moe_shared_expert_intermediate_size": 86,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}

_LOCAL_THEN_ALL = ["sliding_attention", "full_attention"]
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}

VARIANTS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied, biases, llama3 rotary": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama, several bands, tied Q6_K": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 300,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama, one head, relu": {
        "model_type": "llama",
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_act": "relu",
    },
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 5, "head_dim": 8},
    "ministral, windows in every second layer": {
        "model_type": "ministral",
        "sliding_window": 5,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mistral, no window": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2, biases, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, every second layer slides": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3, wide heads, yarn": {
        "model_type": "qwen3",
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama, segments": {"model_type": "llama", "bases": (0, 1)},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "gemma2, soft caps": {
        "model_type": "gemma2",
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma3, two rotary tables": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    },
    "gemma4, heads of two sizes": GEMMA_4,
    "gemma4, keys for values": {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4, inputs of each layer, shared keys and values": {
        **GEMMA_4,
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention", "full_attention", "sliding_attention"], *_LOCAL_THEN_ALL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 14,
        "vocab_size_per_layer_input": SMALL["vocab_size"],
    },
    "gemma4, a dense MLP beside experts": {
        **GEMMA_4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "intermediate_size": 111,
        "moe_intermediate_size": 37,
        "num_experts": 6,
        "top_k_experts": 2,
    },
    "gemma, wide heads": {"model_type": "gemma", "head_dim": 12, "tie_word_embeddings": True, "pad_token_id": 0},
    "vaultgemma, soft caps, no norms after": {
        "model_type": "vaultgemma",
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 20.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "cwm, windows": {
        "model_type": "cwm",
        "head_dim": 12,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "exaone4, only layers with a window turn": {
        "model_type": "exaone4",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hyperclovax, multipliers": {
        "model_type": "hyperclovax",
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "granite, multipliers": {
        "model_type": "granite",
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.6,
        "tie_word_embeddings": True,
    },
    "granite 4, gate and up in one": {**GRANITE_4, "position_embedding_type": "rope"},
    "granite 4, no layer that turns": {**GRANITE_4, "position_embedding_type": "nope"},
    "granite 4, states": {
        **GRANITE_4,
        "position_embedding_type": "nope",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 18,
        "mamba_chunk_size": 8,
        "time_step_limit": [0.0, 1e9],
    },
    "smollm3, a layer that does not turn": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "olmo, LayerNorm without weights": {"model_type": "olmo"},
    "olmo2, norms after": {"model_type": "olmo2"},
    "olmo3, windows, yarn": {
        "model_type": "olmo3",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        },
    },
    "nemotron, LayerNorm, without a gate": {
        "model_type": "nemotron",
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "arcee, without a gate": {"model_type": "arcee", "mlp_bias": True, "head_dim": 8},
    "seed_oss, biases": {"model_type": "seed_oss", "head_dim": 16, "attention_bias": True, "attention_out_bias": True},
    "ministral3, yarn": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "ministral3, texts within the first positions": {"model_type": "ministral3", "head_dim": 16},
    "glm4, neighbours of a half of each head turn": {
        "model_type": "glm4",
        "head_dim": 16,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "glm, norms before alone": {
        "model_type": "glm",
        "head_dim": 8,
        "pad_token_id": 0,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "ernie4_5, neighbours turn": {"model_type": "ernie4_5", "head_dim": 12, "use_bias": True},
    "helium, neighbours turn": {"model_type": "helium", "head_dim": 8},
    "bitnet, norms before attn_out and mlp_mid": {"model_type": "bitnet", "intermediate_size": 171},
    "cohere2, attention and MLP side by side": {
        "model_type": "cohere2",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "apertus, xIELU": {"model_type": "apertus", "intermediate_size": 171, "pad_token_id": 0},
    "gpt_oss, sinks": GPT_OSS,
    "qwen3.5, states": {
        "model_type": "qwen3_5_text",
        **DELTA_NETS,
        "intermediate_size": 171,
        "tie_word_embeddings": True,
    },
    "qwen3.5, states of another shape": {
        "model_type": "qwen3_5_text",
        **DELTA_NETS,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "num_key_value_heads": 8,
    },
    "lfm2, short convolutions": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_multiple_of": 4,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "phi3, sliding window": {"model_type": "phi3", "sliding_window": 5, "pad_token_id": 0},
    "phi3, a part of each head, longrope": {
        "model_type": "phi3",
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        },
    },
}


def random_model(variant: str = "llama", seed: int = 0, **changes: Any) -> PackedModel:
    """A packed model with random weights, large enough for attention and thresholds to matter; every site dense.

    tails, row_scales -- among the changes: whether last rows are tails, as artifacts have them, or padded bands, and
                         whether rows have scales, likewise
    block             -- likewise: the type of the superblocks
    """
    from transformers import AutoConfig

    values = {**SMALL, **VARIANTS[variant], **changes}
    bases, block = values.pop("bases", ()), values.pop("block", "Q4_K")
    encode, row_scales = encoder(values.pop("tails", False), block), values.pop("row_scales", False)
    zigzag_order = MatrixFormat(block, "zigzag")
    config = AutoConfig.for_model(**values)
    family = family_of_config(config)
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(config)

    def weight(name: str) -> Tensor:
        if name not in shapes and (family.bare_norms or not family.norm_biases):
            return torch.full((config.hidden_size,), float(name.endswith(".weight")))
        x = torch.randn(shapes[name], generator=generator)
        if re.search(r"norm(_\d)?\.weight$", name):
            return 1 + 0.2 * x
        return 0.3 * x if x.dim() == 1 or name.endswith("bias") else x * 2 / x.shape[-1] ** 0.5

    def site(prefix: str, projections: tuple[str, ...]) -> PackedSite:
        weights = [weight(f"{prefix}.{p}.weight") for p in projections]
        parts = tuple(len(w) for w in weights)
        has = [f"{prefix}.{p}.bias" in shapes for p in projections]
        bias = torch.cat([weight(f"{prefix}.{p}.bias") for p in projections]) if all(has) else None
        stacked = torch.cat(weights)
        blocks, tail = encode(stacked)
        row_scale = 0.5 + torch.rand(len(stacked), generator=generator) if row_scales else None
        return PackedSite(PackedMatrix(blocks, zigzag_order, *stacked.shape, tail, row_scale), bias, None, parts)

    def norms_of(layer: int) -> dict[str, Tensor]:
        names = {name: f"model.layers.{layer}.{of}" for name, of in family.at(config, layer).norms.items()}
        found = {name: weight(f"{module}.weight") for name, module in names.items()}
        biased = names if family.layer_norms else {}
        return found | {f"{name}_bias": weight(f"{module}.bias") for name, module in biased.items()}

    def delta_net(layer: int) -> dict[str, Tensor]:
        names = family.state
        if names is None or layer not in state_layers(config):
            return {}
        found = {name: weight(f"model.layers.{layer}.{tensor}") for name, tensor in names.tensors.items()}
        return {name: value[:, 0] if value.dim() == 3 else value for name, value in found.items()}

    def experts(prefix: str) -> ExpertMlp:
        numbers = architecture_of(config, None).experts
        assert numbers is not None
        assert family.experts is not None
        sites = {}
        for name in MLP_SITES:
            first, *shared = (weight(f"{prefix}.{family.weight(each)}") for each in family.projections[name])
            stacked = torch.cat([first, as_experts(name, shared, config.moe_intermediate_size)]) if shared else first
            blocks, tails = zip(*(encode(matrix) for matrix in stacked), strict=True)
            tail = None if tails[0] is None else torch.stack(tails)
            rows = stacked.shape[1]
            parts = (rows // 2, rows // 2) if name == "mlp_in" and family.gated else (rows,)
            matrix = PackedExperts(torch.stack(blocks), zigzag_order, rows, stacked.shape[2], tail)
            bias = weight(f"{prefix}.{family.bias(family.projections[name][0])}") if family.experts.biased else None
            sites[name] = PackedExpertsSite(matrix, None, parts, bias)
        router, shared_of = weight(f"{prefix}.{family.experts.router}.weight"), family.experts.shared
        gate = None if shared_of is None or not shared_of.gate else weight(f"{prefix}.{shared_of.gate}.weight")
        bias = weight(f"{prefix}.{family.experts.router}.bias") if family.experts.biased else None
        routing = family.experts.routing
        correction = weight(f"{prefix}.{routing.correction}") if routing is not None and routing.correction else None
        own, how = family.experts.own_norms, (gate, bias, numbers.router, correction)
        scale = None if own is None else 0.5 + weight(f"{prefix}.{own.experts}").abs()
        return ExpertMlp(router, numbers.used, numbers.normalised, sites, *how, scale)

    def by_rows(name: str, type: str) -> PackedMatrix:
        value = weight(name)
        return PackedMatrix(BLOCKS[type].encode(value), MatrixFormat(type), *value.shape)

    has_inputs = per_layer_width(config) > 0

    def per_layer(layer: int) -> PackedPerLayer | None:
        if family.per_layer is None or not has_inputs:
            return None
        prefix, names = f"model.layers.{layer}", family.per_layer
        gate, out = (by_rows(f"{prefix}.{module}.weight", "F16") for module in (names.gate, names.out))
        return PackedPerLayer(gate, out, weight(f"{prefix}.{names.out_norm}.weight"))

    def per_layer_inputs() -> PackedPerLayerInputs | None:
        if family.per_layer is None or not has_inputs:
            return None
        table, projection, norm = (f"model.{module}.weight" for module in family.per_layer.outside)
        return PackedPerLayerInputs(by_rows(table, "F16"), by_rows(projection, "F16"), weight(norm))

    def sites_of(layer: int) -> dict[str, PackedSite]:
        names = family.at(config, layer)
        of_experts = MLP_SITES if names.experts is not None else ()
        return {
            name: site(f"model.layers.{layer}", projections)
            for name, projections in names.projections.items()
            if name not in of_experts
        }

    layers = tuple(
        layer_of(
            sites_of(i),
            norms_of(i),
            None if family.experts_of(i) is None else experts(f"model.layers.{i}"),
            weight(f"model.layers.{i}.{family.sinks}") if family.sinks else None,
            delta_net(i),
            0.5 + weight(f"model.layers.{i}.{family.layer_scalar}").abs() if family.layer_scalar else None,
            per_layer(i),
            torch.tensor([0.3, -1.0, 0.5, -1e-3]) + 0.2 * i if family.activation_parameters else None,
        )
        for i in range(config.num_hidden_layers)
    )
    embedding = by_rows(family.embedding, "F16" if config.hidden_size % 256 else "Q6_K")
    packed = PackedModel(
        architecture=architecture_of(config, config.bos_token_id),
        layers=layers,
        embedding=embedding,
        output_norm=weight(family.last_norm),
        output_norm_bias=weight(family.last_norm_bias) if family.layer_norms else None,
        output=embedding if config.tie_word_embeddings else by_rows("lm_head.weight", "BF16"),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"kind": str(zigzag_order), "model": {"name": f"random {variant}"}},
        per_layer=per_layer_inputs(),
    )
    return with_bases(packed, bases)


def encoder(tails: bool, block: str = "Q4_K") -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """What quantises a matrix in zigzag order."""
    return lambda weight: zigzag.pack_with_tail(weight, block) if tails else (zigzag.pack(weight, block), None)


def with_bases(packed: PackedModel, starts: Collection[int], type: str = "Q8_0") -> PackedModel:
    """The model with a random change of basis before some blocks, of which it is another model."""
    hidden, layers = packed.architecture.hidden, [*packed.layers]
    for layer in starts:
        generator = torch.Generator().manual_seed(layer)
        q = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
        basis = PackedMatrix(BLOCKS[type].encode(q), MatrixFormat(type), hidden, hidden)
        layers[layer] = dataclasses.replace(layers[layer], basis=basis)
    return dataclasses.replace(packed, layers=tuple(layers))


def layer_of(
    sites: Mapping[str, Any],
    norms: Mapping[str, Tensor],
    mlp: ExpertMlp | None = None,
    sinks: Tensor | None = None,
    delta_net: Mapping[str, Tensor] = MappingProxyType({}),
    scalar: Tensor | None = None,
    per_layer: PackedPerLayer | None = None,
    xielu: Tensor | None = None,
) -> PackedLayer:
    """A block whose MLP is dense, or is given."""
    attention = _without_mlp(sites)
    mlp = mlp or DenseMlp({name: sites[name] for name in MLP_SITES if name in sites})
    more = {"sinks": sinks, "delta_net": delta_net, "scalar": scalar, "per_layer": per_layer, "xielu": xielu}
    return PackedLayer(attention, norms, mlp, **more)  # type: ignore[arg-type]


def _without_mlp(sites: Mapping[str, Any]) -> dict[str, Any]:
    return {name: site for name, site in sites.items() if name not in MLP_SITES}


def with_sites(layer: PackedLayer, changed: Mapping[str, Any]) -> PackedLayer:
    """The same block with these sites in place of their namesakes."""
    sites = {**layer.sites, **changed}
    if isinstance(layer.mlp, DenseMlp):
        more = {
            "delta_net": layer.delta_net,
            "scalar": layer.scalar,
            "per_layer": layer.per_layer,
            "xielu": layer.xielu,
        }
        return dataclasses.replace(layer_of(sites, layer.norms, **more), basis=layer.basis)  # type: ignore[arg-type]
    if isinstance(layer.mlp, ExpertMlp):
        mlp = dataclasses.replace(layer.mlp, sites={name: sites[name] for name in MLP_SITES})
        return dataclasses.replace(layer, attention=_without_mlp(sites), mlp=mlp)
    return dataclasses.replace(layer, attention=sites)


def by_neurons(packed: PackedModel, seed: int = 0, gates: str = "zigzag", tails: bool = False) -> PackedModel:
    """The same model, quantised once more, its MLPs stored by neurons in a random order, their gates in this one."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in packed.layers:
        sites = dict(layer.sites)
        down = decode_matrix(sites.pop("mlp_mid").matrix)
        gate, *ups = decode_matrix(sites.pop("mlp_in").matrix).split(down.shape[1])
        width = (1 + len(ups)) * len(down)
        order = torch.randperm(len(gate), generator=generator)
        blocks, tail = encoder(tails)(gate[order])
        mlp = NeuronMlp(
            gate=(
                PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), *gate.shape, tail)
                if gates == "zigzag"
                else PackedMatrix(BLOCKS["Q4_K"].encode(gate[order]), MatrixFormat("Q4_K"), *gate.shape)
            ),
            records=PackedMatrix(
                neurons.pack(ups[0] if ups else None, down, order), MatrixFormat("Q4_K"), len(gate), width
            ),
            frequency=torch.linspace(1, 0, len(gate)),
            order=order,
        )
        layers.append(dataclasses.replace(layer, attention=sites, mlp=mlp))
    return dataclasses.replace(packed, layers=tuple(layers), manifest={**packed.manifest, "kind": "neuron-q4_k"})


def stock_model(packed: PackedModel) -> Any:
    """The stock transformers model with the packed weights, float32."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**json.loads(packed.config_json))
    return build_model(config, dequantised(packed), bases=packed.bases)


class Sparsifier:
    """A site function that sparsifies positions from `sparse_from` on, and keeps what those put in."""

    def __init__(self, packed: PackedModel, sparse_from: int) -> None:
        self.packed, self.sparse_from = packed, sparse_from
        self.inputs: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, site: str, x: Tensor) -> Tensor:
        sparse = x[:, self.sparse_from :]
        self.inputs[layer, site] = sparse[0]
        stored = self.packed.layers[layer].sites.get(site)
        rule = None if stored is None else stored.rule
        return x if rule is None else torch.cat([x[:, : self.sparse_from], sparsify(sparse, rule)], dim=1)


def stock_logits(model: Any, packed: PackedModel, ids: list[int], sparse_from: int) -> tuple[Tensor, Sparsifier]:
    """Teacher-forced logits [S, V] of the stock model, sparsified by the packed model's rules."""
    watch = Sparsifier(packed, sparse_from)
    blocks = list(enumerate(model.model.layers))
    with torch.no_grad(), site_hooks(blocks, FAMILIES[packed.architecture.model_type], watch):
        return model(torch.tensor([ids])).logits[0], watch


def with_rules(packed: PackedModel, model: Any, ids: list[int], starts: list[int], seed: int = 0) -> PackedModel:
    """The model with a rule at every site but one, about half of the channels active on `ids`.

    Kinds alternate: a scalar threshold, a threshold per channel, either with an offset. Each threshold lies amid a
    gap of the scores that the stock model really has, sparse from any of `starts`, so that the last bit of an input
    never decides.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(packed.layers)):
        for number, site in enumerate(packed.layers[layer].sites):
            if (layer, number) == (1, 2):
                continue
            kind = layer + number
            seen = [stock_logits(model, packed, ids, start)[1].inputs[layer, site] for start in starts]
            x = torch.cat(seen)  # [positions, columns]
            of_experts = isinstance(packed.layers[layer].mlp, ExpertMlp)
            fixed = of_experts and site in MLP_SITES  # experts have no offsets
            shift = kind % 3 == 1 and not fixed
            offset = x.mean(0) + 0.1 * torch.randn(x.shape[1], generator=generator) if shift else None
            d = x if offset is None else x - offset
            cost = 0.5 + torch.rand(x.shape[-1], generator=generator) if kind % 2 else torch.ones(())
            # Models with experts have many scores, so that gaps are narrow.
            rule = SiteRule(_amid_a_gap(d.abs() * cost, 25 if of_experts else 5) / cost, offset)
            packed = _with_rule(packed, layer, site, rule)
    return packed


def with_levels(packed: PackedModel, seed: int = 0) -> PackedModel:
    """A model of blocks with planes with thresholds of levels at every site but one, other ones for each column."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(packed.layers)):
        for name, site in packed.layers[layer].sites.items():
            if (layer, name) == (1, "attn_out"):
                continue
            shape: tuple[int, ...] = (site.matrix.columns,)
            if isinstance(site, PackedExpertsSite) and name == "mlp_mid":
                shape = (site.matrix.experts, *shape)
            of_site = 2 if name in ("attn_in", "mlp_in") else 0.5
            threshold = of_site * torch.rand(shape, generator=generator)
            steps = 0.2 + torch.rand(len(site.matrix.levels), generator=generator).sort().values
            packed = _with_rule(packed, layer, name, SiteRule(threshold, steps=steps))
    return packed


def _amid_a_gap(scores: Tensor, near: int) -> Tensor:
    """So many hundredths of the scores or fewer from the median, the middle of the widest gap between neighbours."""
    ordered = scores.flatten().sort().values
    middle = ordered[len(ordered) * (50 - near) // 100 : len(ordered) * (50 + near) // 100 + 2]
    widest = int(middle.diff().argmax())
    return (middle[widest] + middle[widest + 1]) / 2


def _with_rule(packed: PackedModel, layer: int, site: str, rule: SiteRule) -> PackedModel:
    layers = [*packed.layers]
    layers[layer] = with_sites(layers[layer], {site: dataclasses.replace(layers[layer].sites[site], rule=rule)})
    return dataclasses.replace(packed, layers=tuple(layers))

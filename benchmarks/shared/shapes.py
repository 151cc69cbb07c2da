"""Shapes of real models that benchmarks fill with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

CONTEXT = 8192
SHARPER = 4.0
"""Weights of random routers are so many times as large as those of other matrices, as trained ones are sharper: else
rounding would choose other experts."""


@dataclass(frozen=True)
class Size:
    """The numbers of a Llama."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


BILLION = Size("llama-1b", 2048, 16, 8192, 32, 8, 32000)
LLAMA_3_2_1B = Size("llama-3.2-1b", 2048, 16, 8192, 32, 8, 128256, tied=True)
QWEN_0_5B = Size("qwen2.5-0.5b", 896, 24, 4864, 14, 2, 151936, tied=True)
"""The widths of Qwen2.5-0.5B; a Llama all the same."""
SMALL = Size("llama-small", 1024, 12, 3072, 16, 4, 32000, tied=True)
SMOL = Size("smollm2-135m", 576, 30, 1536, 9, 3, 49152, tied=True)
TINY = Size("llama-tiny", 256, 2, 512, 4, 2, 512)
LLAMA_8B = Size("Llama-3-8B", 4096, 32, 14336, 32, 8, 128256)
LLAMA_7B = Size("Llama-2-7B", 4096, 32, 11008, 32, 32, 32000)
LLAMA_1B = Size("Llama-3.2-1B", 2048, 16, 8192, 32, 8, 128256)
LLAMA_70B = Size("Llama-3-70B", 8192, 80, 28672, 64, 8, 128256)
SIZES = {
    "tiny": Size("tiny", 512, 4, 1280, 8, 4, 8192),
    "13b": Size("Llama-2-13B", 5120, 40, 13_824, 40, 40, 32_000),
    "70b": Size("Llama-2-70B", 8192, 80, 28_672, 64, 8, 32_000),
}
"""Shapes of models that a GPU may not hold."""


def llama_config(size: Size, **changes: Any) -> Any:
    """Return the transformers configuration of a Llama of a size, with some fields changed."""
    from transformers import LlamaConfig

    values = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": size.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    return LlamaConfig(**{**values, **changes})


def random_ids(vocabulary: int, count: int, seed: int) -> list[int]:
    """Return random token ids."""
    ids: list[int] = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


_QWEN_3_5 = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}
_NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma-2-2b": {
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        "gemma-3-1b": {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
        },
        "gemma-4-26b-a4b": {
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
        },
        "phi-4-mini": {
            "model_type": "phi3",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        "olmoe-1b-7b": {
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
        "qwen1.5-moe-a2.7b": {
            "model_type": "qwen2_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
        },
        "qwen3.5-0.8b": {
            **_QWEN_3_5,
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        "qwen3.6-27b": {
            **_QWEN_3_5,
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "tie_word_embeddings": False,
        },
        "qwen3.6-35b-a3b": {
            **_QWEN_3_5,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": False,
        },
        "lfm2-1.2b": {
            "model_type": "lfm2",
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "layer_types": ["full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)],
            "tie_word_embeddings": True,
        },
        "nemotron-3-nano-30b-a3b": {
            "model_type": "nemotron_h",
            "vocab_size": 131072,
            "hidden_size": 2688,
            "layers_block_type": [_NEMOTRON[kind] for kind in 5 * "MEMEM*E" + "MEMEMEM*E" + 4 * "ME"],
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
        },
        "gpt-oss-20b": {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    }
)
"""The transformers configuration of each model."""


def first_layers(name: str, layers: int) -> dict[str, Any]:
    """Return the fields of `configuration` for a model of so many layers, of which blocks that are a mixer or an MLP
    alone are halves. Two are three layers and a half there: all kinds of blocks, some after each other."""
    kinds = MODELS[name].get("layers_block_type")
    return {"num_hidden_layers": layers} if kinds is None else {"layers_block_type": kinds[: max(2 * layers, 7)]}


def configuration(name: str, **changes: Any) -> Any:
    """Return the configuration of a model of `MODELS`, with some fields changed."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**MODELS[name], "bos_token_id": 2, "eos_token_id": 1, **changes})

"""The configurations, as transformers has them, of models that benchmarks fill with random weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mixtures import QWEN3_30B, fields

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
        "qwen3-30b-a3b": {"model_type": "qwen3_moe", **fields(QWEN3_30B)},
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
    }
)
"""Each stands under its model's name."""


def configuration(name: str, **changes: Any) -> Any:
    """The configuration of a name in `MODELS`, with some settings changed."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**MODELS[name], "bos_token_id": 2, "eos_token_id": 1, **changes})

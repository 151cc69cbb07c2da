"""Random mixtures of experts: their numbers, as of a Qwen3-MoE, and the configurations of transformers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig

SHARPER = 4.0
"""The router's weights are so many times as large as those of other matrices."""


@dataclass(frozen=True)
class Mixture:
    """The numbers of a Qwen3-MoE."""

    name: str
    hidden: int
    layers: int
    width: int
    experts: int
    used: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


THREE_BILLION = Mixture("mixture-3b", 2048, 18, 768, 32, 4, 32, 8, 64, 32000)
THIRTY_BILLION = Mixture("mixture-30b", 2048, 48, 768, 128, 8, 32, 4, 128, 8192)
"""The shape of Qwen3-30B-A3B, with a small vocabulary."""
TINY = Mixture("mixture-tiny", 256, 2, 256, 8, 2, 4, 2, 64, 512)
QWEN3_30B = Mixture("Qwen3-30B-A3B", 2048, 48, 768, 128, 8, 32, 4, 128, 151936)


def fields(size: Mixture) -> dict[str, Any]:
    """What transformers has to know of a mixture."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "moe_intermediate_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_experts": size.experts,
        "num_experts_per_tok": size.used,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }


def configuration(size: Mixture, **settings: Any) -> "Qwen3MoeConfig":
    """The configuration of a mixture, with settings that change it."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**{**fields(size), "bos_token_id": None, "eos_token_id": 0, **settings})

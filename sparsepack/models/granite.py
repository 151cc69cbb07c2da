"""Granite 3 (dense): Llama with multipliers of the embedding, attention scores, residual sums and logits."""

from types import MappingProxyType
from typing import Any

from sparsepack.models.blocks import Multipliers
from sparsepack.models.family import Family, LlamaCpp


def _multipliers(config: Any) -> Multipliers:
    return Multipliers(
        embedding=float(config.embedding_multiplier),
        attention=float(config.attention_multiplier),
        residual=float(config.residual_multiplier),
        logits=1 / float(config.logits_scaling),
    )


FAMILIES = (
    Family(
        "granite",
        LlamaCpp(
            "granite",
            permuted=True,
            transformers=False,
            keys=MappingProxyType(
                {
                    "attention.scale": "attention_multiplier",
                    "embedding_scale": "embedding_multiplier",
                    "residual_scale": "residual_multiplier",
                    "logit_scale": "logits_scaling",
                }
            ),
        ),
        fields=MappingProxyType({"rms_norm_eps": ""}),  # engines have another, of a stream that is scaled
        multipliers=_multipliers,
        scales_input="embedding_multiplier",
        divides_logits="logits_scaling",
    ),
)

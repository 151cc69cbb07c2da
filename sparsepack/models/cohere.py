"""Cohere 2 (Command R7B and A): attention and MLP read one LayerNorm, which has no bias, and both are added; windows
and a rotary embedding, whose channels turn as neighbours, in three of four layers, neither in the fourth."""

from types import MappingProxyType
from typing import Any

from sparsepack.models.blocks import Multipliers
from sparsepack.models.family import Family


def _multipliers(config: Any) -> Multipliers:
    return Multipliers(logits=float(config.logit_scale))


FAMILIES = (
    Family(
        "cohere2",
        norms=MappingProxyType({"attn_norm": "input_layernorm"}),
        rotary="interleaved",
        fields=MappingProxyType({"rms_norm_eps": "layer_norm_eps"}),
        layer_norms=True,
        norm_biases=False,
        parallel=True,
        slides=True,
        rope_only_in_windows=True,
        multipliers=_multipliers,
        divides_logits="logit_scale",
        residual=None,
        unrotatable="its norms subtract the mean, which is not the same in another basis",
    ),
)

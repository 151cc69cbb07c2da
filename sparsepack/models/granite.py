"""Granite 3 and 4 (dense): Llama with multipliers of the embedding, attention scores, residual sums and logits; the
fourth has gate and up in one matrix, and models whose layers have no rotary embedding, and most of whose layers are
state-space models (Granite 4 H). HyperCLOVA X multiplies its
logits where Granite divides them, and norms what attention and MLP add."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsepack.models.blocks import Multipliers
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import NORMS, PROJECTIONS, MambaNames


def _multipliers(config: Any) -> Multipliers:
    return Multipliers(
        embedding=float(config.embedding_multiplier),
        attention=float(config.attention_multiplier),
        residual=float(config.residual_multiplier),
        logits=1 / float(config.logits_scaling),
    )


def _hyperclovax(config: Any) -> Multipliers:
    return replace(_multipliers(config), logits=float(config.logits_scaling))


_LLAMA_CPP = LlamaCpp(
    "granite",
    permuted=True,
    transformers=False,
    rope_switch=True,
    keys=MappingProxyType(
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        }
    ),
)
_GRANITE3 = Family(
    "granite",
    _LLAMA_CPP,
    fields=MappingProxyType({"rms_norm_eps": ""}),  # engines have another, of a stream that is scaled
    multipliers=_multipliers,
    scales_input="embedding_multiplier",
    divides_logits="logits_scaling",
)

FAMILIES = (
    _GRANITE3,
    replace(
        _GRANITE3,
        model_type="granitemoehybrid",
        gguf=replace(
            _LLAMA_CPP,
            parts=MappingProxyType(
                {ours: theirs.replace("mlp.", "shared_mlp.") for ours, theirs in _LLAMA_CPP.parts.items()}
                | {"ffn_down": "shared_mlp.output_linear"}
            ),
        ),
        projections=MappingProxyType(
            {**PROJECTIONS, "mlp_in": ("shared_mlp.input_linear",), "mlp_mid": ("shared_mlp.output_linear",)}
        ),
        split=MappingProxyType({"shared_mlp.input_linear": ("gate_proj", "up_proj")}),
        fields=MappingProxyType({**_GRANITE3.fields, "intermediate_size": "shared_intermediate_size"}),
        rope_field="position_embedding_type",
        only=MappingProxyType({"num_local_experts": 0, "mamba_conv_bias": True, "mamba_proj_bias": False}),
        mamba=MambaNames("linear_attention", norms=True),
    ),
    replace(
        _GRANITE3,
        model_type="hyperclovax",
        gguf=None,
        norms=MappingProxyType({**NORMS, "attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}),
        multipliers=_hyperclovax,
        residual=None,
        unrotatable="norms stand between its matrices and what they add to",
        only=MappingProxyType({"use_post_norm": True, "residual_multiplier": 1.0}),
    ),
)

"""Gemma: (1 + w) in norms, GELU, a scaled embedding. Gemma 2 and 3 have norms before and after and windows in most
layers, 2 soft caps, 3 norms of heads and rotary frequencies of layers with a window. VaultGemma is 2 without norms
after. In 4 norms multiply by w alone, layers without a window have wider heads and may take keys for values, values
are normed, and each layer is scaled. In E2B and E4B each token has an input for each layer, and the last layers read
keys and values of earlier ones. A mixture of 4 has a dense MLP beside experts in each block, which here is so many
experts more that every token has, and norms what either makes."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsepack.models.blocks import Multipliers
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, LlamaCpp
from sparsepack.models.parts import NORMS, PROJECTIONS, Experts, OwnNorms, PerLayerNames, SharedExpert, SharedKv

_CAPS = MappingProxyType(
    {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
)


def _multipliers_1(config: Any) -> Multipliers:
    return Multipliers(embedding=float(config.hidden_size**0.5))


def _multipliers_2(config: Any) -> Multipliers:
    attention, logits = (float(getattr(config, name, None) or 0.0) for name in _CAPS.values())
    return replace(_multipliers_3(config), attention_cap=attention, logit_cap=logits)


def _multipliers_3(config: Any) -> Multipliers:
    scalar, cap = config.query_pre_attn_scalar, getattr(config, "final_logit_softcapping", None)
    return Multipliers(
        embedding=float(config.hidden_size**0.5),
        attention=0.0 if scalar in (None, config.head_dim) else float(scalar**-0.5),
        logit_cap=float(cap or 0.0),  # transformers does not look at the scores' here
    )


def _multipliers_4(config: Any) -> Multipliers:
    cap = float(config.final_logit_softcapping or 0.0)
    return replace(_multipliers_1(config), attention=1.0, logit_cap=cap)


_LLAMA_CPP = LlamaCpp(
    "gemma2",
    parts=MappingProxyType(
        {
            **GGUF_PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    biases=(),
    keys=_CAPS,
    head_field="query_pre_attn_scalar",
    activation="gelu_pytorch_tanh",
    window_every=2,
    untied=False,
    wide=46,
)
_GEMMA2 = Family(
    "gemma2",
    _LLAMA_CPP,
    norms=MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    ),
    fields=MappingProxyType({"hidden_act": "hidden_activation"}),
    slides=True,
    norm_offset=1.0,
    attention="eager",
    multipliers=_multipliers_2,
    residual=None,
    unrotatable="norms stand between its matrices and what they add to",
)

_OFFSET = "norms multiply by one more than their weights"

_LLAMA_CPP_4 = replace(
    _LLAMA_CPP,
    architecture="gemma4",
    tensors=MappingProxyType({"layer_output_scale.weight": "layer_scalar"}),
    keys=MappingProxyType({"final_logit_softcapping": "final_logit_softcapping"}),
    head_field="",
    window_every=0,
    window_pattern=True,
    untied=True,
    scale=1.0,
    transformers=False,
)
_GEMMA4 = replace(
    _GEMMA2,
    model_type="gemma4_text",
    gguf=_LLAMA_CPP_4,
    norms=MappingProxyType({**_GEMMA2.norms, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}),
    norm_offset=0.0,
    attention="sdpa",
    local_rotary=True,
    multipliers=_multipliers_4,
    global_heads=True,
    k_eq_v="attention_k_eq_v",
    value_norm=True,
    layer_scalar="layer_scalar",
    per_layer=PerLayerNames(),
    shared_kv=SharedKv(),
    mixes="enable_moe_block",
)

_SHARED = SharedExpert("mlp", gate="", norm="post_feedforward_layernorm_1", width="intermediate_size")
_EXPERTS = Experts(
    "experts",
    "router.proj",
    stored="",
    parts=("", "", ""),
    used="top_k_experts",
    shared=_SHARED,
    own_norms=OwnNorms(),
)
_IN, _MID = _EXPERTS.parameters
_GEMMA4_MIXTURE = replace(
    _GEMMA4,
    gguf=replace(
        _LLAMA_CPP_4,
        parts=MappingProxyType(
            {
                **_LLAMA_CPP_4.parts,
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_exps": "experts.gate_proj",
                "ffn_up_exps": "experts.up_proj",
                "ffn_down_exps": "experts.down_proj",
            }
        ),
        tensors=MappingProxyType(
            {
                **_LLAMA_CPP_4.tensors,
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            }
        ),
    ),
    mixes="",
    per_layer=None,
    shared_kv=None,
    only=MappingProxyType({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    experts=_EXPERTS,
    fields=MappingProxyType({**_GEMMA4.fields, "intermediate_size": "moe_intermediate_size"}),
    projections=MappingProxyType(
        {
            **PROJECTIONS,
            "mlp_in": (_IN, *_SHARED.projections[0]),
            "mlp_mid": (_MID, *_SHARED.projections[1]),
        }
    ),
    norms=MappingProxyType(
        {
            **_GEMMA4.norms,
            "mlp_norm": "pre_feedforward_layernorm_2",
            "experts_norm": "post_feedforward_layernorm_2",
            "shared_norm": _SHARED.norm,
        }
    ),
)

FAMILIES = (
    replace(
        _GEMMA2,
        model_type="gemma",
        gguf=LlamaCpp("gemma", biases=(), activation="gelu_pytorch_tanh", untied=False),
        norms=NORMS,
        fields={},
        slides=False,
        attention="sdpa",
        multipliers=_multipliers_1,
        unrotatable=_OFFSET,
    ),
    _GEMMA2,
    replace(
        _GEMMA2,
        model_type="vaultgemma",
        gguf=None,
        norms=MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
        unrotatable=_OFFSET,
    ),
    replace(
        _GEMMA2,
        model_type="gemma3_text",
        gguf=replace(_LLAMA_CPP, architecture="gemma3", keys={}, window_every=6, wide=62, local_base=1e4),
        norms=MappingProxyType({**_GEMMA2.norms, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}),
        attention="sdpa",
        local_rotary=True,
        multipliers=_multipliers_3,
    ),
    replace(_GEMMA4, mixture=_GEMMA4_MIXTURE),
    replace(_GEMMA4, model_type="gemma4_unified_text", mixes="", per_layer=None),
)

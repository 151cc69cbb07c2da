"""DeepSeek V2 and V3, and GLM-4.7-Flash: attention whose queries, keys and values are made of latents (MLA), mixtures
with shared experts behind some dense blocks, and, but for V2, routers of sigmoids with a bias of each expert."""

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsepack.models.blocks import Multipliers
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import EXPERT_PARTS, GGUF_PARTS, LlamaCpp
from sparsepack.models.parts import LATENT_NORMS, NORMS, PROJECTIONS, DenseMlps, Experts, RouterNames, SharedExpert


def _multipliers(config: Any) -> Multipliers:
    """Scores of a text that YaRN has stretched are sharper."""
    rope, scale = config.rope_parameters or {}, config.qk_head_dim**-0.5
    sharper = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    if sharper and rope["factor"] > 1:
        scale *= (0.1 * sharper * math.log(rope["factor"]) + 1) ** 2
    return Multipliers(attention=scale)


_SHARED = SharedExpert("mlp.shared_experts", gate="", count="n_shared_experts")
_SOFTMAX = Experts(
    "mlp.experts",
    "mlp.gate",
    "mlp",
    ("gate_proj", "up_proj", "down_proj"),
    "n_routed_experts",
    shared=_SHARED,
    routing=RouterNames(method="topk_method"),
)
_SIGMOID = replace(
    _SOFTMAX,
    normalised="norm_topk_prob",
    routing=RouterNames(sigmoid=True, correction="mlp.gate.e_score_correction_bias"),
)
_SHARED_IN, _SHARED_MID = _SHARED.projections
_PROJECTIONS = {
    "attn_in": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "attn_q_b": ("self_attn.q_b_proj",),
    "attn_kv_b": ("self_attn.kv_b_proj",),
    "attn_out": PROJECTIONS["attn_out"],
    "mlp_in": (_SOFTMAX.parameters[0], *_SHARED_IN),
    "mlp_mid": (_SOFTMAX.parameters[1], *_SHARED_MID),
}
_NORMS = {**NORMS, LATENT_NORMS[0]: "self_attn.q_a_layernorm", LATENT_NORMS[1]: "self_attn.kv_a_layernorm"}
_LLAMA_CPP = LlamaCpp(
    "deepseek2",
    parts=MappingProxyType(
        {
            **{ours: theirs for ours, theirs in GGUF_PARTS.items() if ours.startswith("ffn_")},
            **{ours: theirs for ours, theirs in EXPERT_PARTS.items() if "_k" not in ours and "_v" not in ours},
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        }
    ),
    tensors=MappingProxyType({"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
    biases=(),
    transformers=False,
    parts_of_heads=True,
    router=("norm", "scale"),
)
_V3 = Family(
    "deepseek_v3",
    _LLAMA_CPP,
    projections=MappingProxyType(_PROJECTIONS),
    norms=MappingProxyType(_NORMS),
    rotary="interleaved",
    fields=MappingProxyType({"intermediate_size": "moe_intermediate_size"}),
    multipliers=_multipliers,
    residual=None,
    unrotatable="its attention keeps latents",
    experts=_SIGMOID,
    only=MappingProxyType({"rope_interleave": True}),
    latent=True,
    dense_mlps=DenseMlps("first_k_dense_replace"),
    predicts="a head for the prediction of several tokens",
)

FAMILIES = (
    _V3,
    replace(_V3, model_type="deepseek_v2", experts=_SOFTMAX, only=MappingProxyType({})),
    replace(_V3, model_type="glm4_moe_lite", dense_mlps=DenseMlps("mlp_layer_types")),
)

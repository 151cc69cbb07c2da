"""Qwen3-Next, Qwen3.5 and 3.6, dense and mixtures of experts: gated delta nets in three of four blocks, in the others
attention with an output gate and a rotary embedding of a part of each head; (1 + w) in norms, but for the one within a
delta net."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, SHARED_EXPERT_PARTS, LlamaCpp
from sparsepack.models.parts import PROJECTIONS, QK_NORMS, DeltaNetNames, Experts, SharedExpert

_STATE_PARTS = MappingProxyType(
    {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)


def _parts(parts: Mapping[str, str]) -> Mapping[str, str]:
    others = {ours: theirs for ours, theirs in parts.items() if ours != "ffn_norm"}
    return MappingProxyType({**others, **_STATE_PARTS, "post_attention_norm": "post_attention_layernorm"})


_EXPERTS = Experts("mlp.experts", "mlp.gate", "mlp", ("gate_proj", "up_proj", "down_proj"), shared=SharedExpert())
_LLAMA_CPP = LlamaCpp(
    "qwen35",
    parts=_parts(GGUF_PARTS),
    tensors=MappingProxyType({"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}),
    biases=(),
    transformers=False,
    parts_of_heads=True,
)
_DENSE = Family(
    "qwen3_5_text",
    _LLAMA_CPP,
    norms=QK_NORMS,
    norm_offset=1.0,
    delta_net=DeltaNetNames(),
    gated_attention=True,
    residual=None,
    unrotatable="gates stand between its values and its output matrices",
    left_out=MappingProxyType({"mtp.": "a head for the prediction of several tokens"}),
)
_IN, _MID = _EXPERTS.parameters
_SHARED_IN, _SHARED_MID = SharedExpert().projections

_MIXTURE = replace(
    _DENSE,
    model_type="qwen3_5_moe_text",
    gguf=replace(_LLAMA_CPP, architecture="qwen35moe", parts=_parts(SHARED_EXPERT_PARTS)),
    projections=MappingProxyType({**PROJECTIONS, "mlp_in": (_IN, *_SHARED_IN), "mlp_mid": (_MID, *_SHARED_MID)}),
    fields=MappingProxyType({"intermediate_size": "moe_intermediate_size"}),
    experts=_EXPERTS,
)

FAMILIES = (
    _DENSE,
    _MIXTURE,
    replace(
        _MIXTURE,
        model_type="qwen3_next",
        gguf=replace(
            _LLAMA_CPP,
            architecture="qwen3next",
            parts=MappingProxyType(
                {
                    **{
                        ours: theirs
                        for ours, theirs in _parts(SHARED_EXPERT_PARTS).items()
                        if ours not in ("ssm_beta", "ssm_alpha")
                    },
                    "ssm_ba": "linear_attn.in_proj_ba",
                }
            ),
        ),
        delta_net=DeltaNetNames(grouped=True),
        experts=replace(_EXPERTS, normalised="norm_topk_prob", dense={"mlp_only_layers": [], "decoder_sparse_step": 1}),
    ),
)

"""LFM2, dense and mixtures of experts: gated short convolutions in most blocks, which keep their last inputs in place
of keys and values, in the others attention with norms of heads; norms and matrices of other names, and in dense models
an MLP whose width is computed. Mixtures begin with dense MLPs and have routers of sigmoids."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import DenseMlps, Experts, RouterNames, ShortConvNames


def _width(config: Any) -> int:
    """The neurons of an MLP, as `Lfm2MLP` computes them."""
    width: int = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width, multiple = int(config.block_ffn_dim_multiplier * int(2 * width / 3)), config.block_multiple_of
        width = -(-width // multiple) * multiple
    return width


_LLAMA_CPP = LlamaCpp(
    "lfm2",
    parts=MappingProxyType(
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        }
    ),
    last_norm="token_embd_norm",
    biases=(),
    transformers=False,
)

_ATTENTION = {
    "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.out_proj",),
}
_MLP = {"mlp_in": ("feed_forward.w1", "feed_forward.w3"), "mlp_mid": ("feed_forward.w2",)}
_EXPERTS = Experts(
    "feed_forward.experts",
    "feed_forward.gate",
    "feed_forward",
    ("w1", "w3", "w2"),
    normalised="norm_topk_prob",
    routing=RouterNames(sigmoid=True, correction="feed_forward.expert_bias"),
)
_IN, _MID = _EXPERTS.parameters
_DENSE = Family(
    "lfm2",
    _LLAMA_CPP,
    projections=MappingProxyType({**_ATTENTION, **_MLP}),
    norms=MappingProxyType(
        {
            "attn_norm": "operator_norm",
            "mlp_norm": "ffn_norm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
        }
    ),
    after=("embedding_norm",),
    fields=MappingProxyType({"rms_norm_eps": "norm_eps"}),
    activation="silu",
    residual=None,
    unrotatable="convolutions stand between its matrices",
    only=MappingProxyType({"conv_bias": False}),
    short_conv=ShortConvNames(),
    mlp_width=_width,
)

FAMILIES = (
    _DENSE,
    replace(
        _DENSE,
        model_type="lfm2_moe",
        rotary_module="pos_emb",
        gguf=replace(
            _LLAMA_CPP,
            architecture="lfm2moe",
            parts=MappingProxyType(
                {
                    **_LLAMA_CPP.parts,
                    "ffn_gate_inp": "feed_forward.gate",
                    "ffn_gate_exps": "feed_forward.experts.gate_proj",
                    "ffn_up_exps": "feed_forward.experts.up_proj",
                    "ffn_down_exps": "feed_forward.experts.down_proj",
                }
            ),
            tensors=MappingProxyType({"exp_probs_b.bias": "feed_forward.expert_bias"}),
        ),
        projections=MappingProxyType({**_ATTENTION, "mlp_in": (_IN,), "mlp_mid": (_MID,)}),
        fields=MappingProxyType({**_DENSE.fields, "intermediate_size": "moe_intermediate_size"}),
        only=MappingProxyType({**_DENSE.only, "use_expert_bias": True}),
        mlp_width=None,
        experts=_EXPERTS,
        dense_mlps=DenseMlps("num_dense_layers", projections=MappingProxyType(_MLP)),
    ),
)

"""gpt-oss: experts with biases and a clamped SwiGLU, a router with a bias, attention sinks, windows in every other
layer."""

from types import MappingProxyType

from sparsepack.models.blocks import CLAMPED_SWIGLU
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import EXPERT_PARTS, LlamaCpp
from sparsepack.models.parts import PROJECTIONS, Experts

_EXPERTS = Experts(
    "mlp.experts",
    "mlp.router",
    "mlp",
    ("gate_proj", "up_proj", "down_proj"),
    "num_local_experts",
    biased=True,
    alternate=True,
)
_IN, _MID = _EXPERTS.parameters

_LLAMA_CPP = LlamaCpp(
    "gpt-oss",
    parts=MappingProxyType(
        {
            **{ours: theirs for ours, theirs in EXPERT_PARTS.items() if ours != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    ),
    tensors=MappingProxyType({"attn_sinks.weight": "self_attn.sinks"}),
    transformers=False,
    activation=CLAMPED_SWIGLU,
    window_every=2,
    whole_bounds=True,
)

FAMILIES = (
    Family(
        "gpt_oss",
        _LLAMA_CPP,
        projections=MappingProxyType({**PROJECTIONS, "mlp_in": (_IN,), "mlp_mid": (_MID,)}),
        fields=MappingProxyType({"hidden_act": ""}),
        slides=True,
        attention="eager",
        residual=None,
        unrotatable="its experts have biases",
        experts=_EXPERTS,
        sinks="self_attn.sinks",
        activation=CLAMPED_SWIGLU,
        only=MappingProxyType({"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    ),
)

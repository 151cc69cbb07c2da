"""Phi-3 and Phi-4: fused matrices, and in some a rotary embedding of a part of each head or one that follows a text's
length."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import PROJECTIONS

_LLAMA_CPP = LlamaCpp(
    "phi3",
    parts=MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    parts_of_heads=True,
    scalings=("longrope",),
)

FAMILIES = (
    Family(
        "phi3",
        _LLAMA_CPP,
        MappingProxyType({**PROJECTIONS, "attn_in": ("self_attn.qkv_proj",), "mlp_in": ("mlp.gate_up_proj",)}),
        slides=True,
    ),
)

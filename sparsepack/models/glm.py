"""Families whose rotary embedding turns neighbouring channels together: GLM-4 (a half of each head, biases of queries,
keys and values, gate and up in one matrix, in the models of 2025 norms before and after), ERNIE 4.5, Helium."""

from dataclasses import replace
from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, LlamaCpp
from sparsepack.models.parts import NORMS, PROJECTIONS

_PROJECTIONS = MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.gate_up_proj",)})

_QKV = ("attn_q", "attn_k", "attn_v")
_LLAMA_CPP = LlamaCpp(
    "chatglm",
    parts=MappingProxyType(
        {**{ours: theirs for ours, theirs in GGUF_PARTS.items() if ours != "ffn_gate"}, "ffn_up": "mlp.gate_up_proj"}
    ),
    biases=_QKV,
    transformers=False,
    parts_of_heads=True,
)

FAMILIES = (
    Family("glm", _LLAMA_CPP, _PROJECTIONS, rotary="interleaved"),
    Family(
        "glm4",
        replace(
            _LLAMA_CPP,
            architecture="glm4",
            parts=MappingProxyType(
                {
                    **_LLAMA_CPP.parts,
                    "post_attention_norm": "post_self_attn_layernorm",
                    "post_ffw_norm": "post_mlp_layernorm",
                }
            ),
        ),
        projections=_PROJECTIONS,
        norms=MappingProxyType(
            {**NORMS, "attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
        ),
        rotary="interleaved",
        residual=None,
        unrotatable="norms stand between its matrices and what they add to",
    ),
    Family(
        "ernie4_5",
        LlamaCpp("ernie4_5", biases=_QKV, transformers=False),
        fields=MappingProxyType({"attention_bias": "use_bias"}),
        rotary="interleaved",
    ),
    # llama.cpp has no name for it, and turns neighbours in all of its Llamas.
    Family("helium", LlamaCpp("llama", biases=()), rotary="interleaved"),
)

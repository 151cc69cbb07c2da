"""EXAONE 4: norms after attention and MLP in place of norms before, norms of heads, and in models with sliding windows
rotary embedding in the layers that have one alone."""

from types import MappingProxyType

from sparsepack.models.family import GGUF_PARTS, Family, LlamaCpp

FAMILIES = (
    Family(
        "exaone4",
        LlamaCpp(
            "exaone4",
            transformers=False,
            parts=MappingProxyType(
                {
                    **{ours: theirs for ours, theirs in GGUF_PARTS.items() if ours not in ("attn_norm", "ffn_norm")},
                    "post_attention_norm": "post_attention_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm",
                }
            ),
            biases=(),
            scalings=("llama3",),
        ),
        norms=MappingProxyType(
            {
                "attn_post_norm": "post_attention_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
                "q_norm": "self_attn.q_norm",
                "k_norm": "self_attn.k_norm",
            }
        ),
        slides=True,
        rope_in_windows=True,
        residual=None,
        unrotatable="norms stand between its matrices and what they add to",
    ),
)

"""Llama, and families that differ from it in little: Mistral, Ministral and Ministral 3, SmolLM3 (layers without rotary
embedding), Arcee (ReLU^2 without a gate), Seed-OSS (biases of queries, keys and values), CWM (windows in three of
four layers)."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, LlamaCpp
from sparsepack.models.parts import PROJECTIONS

LLAMA_CPP = LlamaCpp("llama", permuted=True, scalings=("llama3",))

FAMILIES = (
    Family("llama", LLAMA_CPP),
    Family("mistral", LLAMA_CPP, slides=True),
    Family("ministral", LLAMA_CPP, slides=True),
    Family("cwm", LLAMA_CPP, slides=True),
    Family(
        "ministral3",
        LlamaCpp(
            "mistral3",
            permuted=True,
            transformers=False,
            keys=MappingProxyType({"attention.temperature_scale": "rope_parameters.llama_4_scaling_beta"}),
        ),
        slides=True,
    ),
    Family(
        "smollm3",
        LlamaCpp("smollm3", permuted=True, transformers=False, biases=(), rope_every=4),
        rope_layers="no_rope_layers",
    ),
    Family(
        "arcee",
        LlamaCpp(
            "arcee",
            permuted=True,
            transformers=False,
            parts=MappingProxyType({ours: theirs for ours, theirs in GGUF_PARTS.items() if ours != "ffn_gate"}),
            biases=(),
            activation="relu2",
            scalings=("llama3",),
        ),
        MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.up_proj",)}),
    ),
    Family(
        "seed_oss",
        LlamaCpp(
            "seed_oss",
            transformers=False,
            parts=MappingProxyType(
                {("post_attention_norm" if ours == "ffn_norm" else ours): theirs for ours, theirs in GGUF_PARTS.items()}
            ),
            biases=("attn_q", "attn_k", "attn_v"),
        ),
    ),
)

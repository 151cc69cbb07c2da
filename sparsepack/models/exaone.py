"""EXAONE 4: norms after attention and MLP in place of norms before, norms of heads, and in models with sliding windows
rotary embedding in the layers that have one alone."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import POST_NORM_PARTS, LlamaCpp
from sparsepack.models.parts import POST_NORMS

FAMILIES = (
    Family(
        "exaone4",
        LlamaCpp(
            "exaone4",
            transformers=False,
            parts=POST_NORM_PARTS,
            biases=(),
            scalings=("llama3",),
        ),
        norms=MappingProxyType({**POST_NORMS, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}),
        slides=True,
        rope_in_windows=True,
        residual=None,
        unrotatable="norms stand between its matrices and what they add to",
    ),
)

"""OLMo: Llama with LayerNorm without weights. OLMo 2 and 3: norms after attention and MLP in place of norms before,
queries and keys of all heads normed together, and in the third windows in three of four layers, whose rotary embedding
is not scaled. OLMoE is in `mixture.py`."""

from dataclasses import replace
from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, POST_NORM_PARTS, LlamaCpp
from sparsepack.models.parts import POST_NORMS

_LLAMA_CPP = LlamaCpp(
    "olmo2",
    transformers=False,
    parts=POST_NORM_PARTS,
    biases=(),
)
_OLMO2 = Family(
    "olmo2",
    _LLAMA_CPP,
    norms=MappingProxyType({**POST_NORMS, "q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"}),
    residual=None,
    unrotatable="norms stand between its matrices and what they add to",
)

FAMILIES = (
    Family(
        "olmo",
        LlamaCpp(
            "olmo",
            permuted=True,
            transformers=False,
            parts=MappingProxyType(
                {ours: theirs for ours, theirs in GGUF_PARTS.items() if ours not in ("attn_norm", "ffn_norm")}
            ),
            biases=(),
        ),
        layer_norms=True,
        bare_norms=True,
        norm_eps=1e-5,
        clips="clip_qkv",
        residual=None,
        unrotatable="its norms subtract the mean, which is not the same in another basis",
    ),
    _OLMO2,
    replace(_OLMO2, model_type="olmo3", gguf=replace(_LLAMA_CPP, window_every=4), slides=True, local_rotary=True),
)

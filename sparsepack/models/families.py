"""Model families as data: which submodules of a decoder block sit at which site, which are norms.

A family is a row here and nothing else: calibration and evaluation hook the stock transformers model, the packers
read tensors by the names below, and the engine is told the numbers (`models/architecture.py`).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sparsepack.errors import CheckpointError

SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
"""Where one hidden vector enters one or more projections of a decoder block, in order of execution."""

MLP_MID = "mlp_mid"
"""The site whose channels are the neurons of the MLP."""

Rotary = Literal["half-split", "interleaved"]
"""Channel c of a head of n turns with c + n / 2 ("half-split", also called neox), or 2 c with 2 c + 1."""


@dataclass(frozen=True)
class Family:
    """A model family. Module names are relative to a decoder block.

    model_type     -- `model_type` of config.json
    gguf           -- llama.cpp's architecture name
    projections    -- site -> its projections, in the order in which their output rows are stacked
    norms          -- our name -> module
    gguf_permuted  -- llama.cpp stores q and k rows with rotary pairs adjacent; Hugging Face keeps the halves apart
    rotary         -- which channels of a head the stock model turns together
    """

    model_type: str
    gguf: str
    projections: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, str]
    gguf_permuted: bool
    rotary: Rotary


_PROJECTIONS = MappingProxyType(
    {
        "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn_out": ("self_attn.o_proj",),
        "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_mid": ("mlp.down_proj",),
    }
)
_NORMS = MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
_QK_NORMS = MappingProxyType({**_NORMS, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("llama", "llama", _PROJECTIONS, _NORMS, True, "half-split"),
            Family("mistral", "llama", _PROJECTIONS, _NORMS, True, "half-split"),
            Family("qwen2", "qwen2", _PROJECTIONS, _NORMS, False, "half-split"),
            Family("qwen3", "qwen3", _PROJECTIONS, _QK_NORMS, False, "half-split"),
        )
    }
)


def family_of(model_type: str, where: str) -> Family:
    """The family of a `model_type`; raises `CheckpointError` naming the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        model_type = str(model_type)[:60]
        near = difflib.get_close_matches(model_type, FAMILIES, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise CheckpointError(
            f"{where}: model type {model_type!r} is not supported{hint}; expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]

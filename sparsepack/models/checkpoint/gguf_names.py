"""llama.cpp's tensor names and rotary row order, beside Hugging Face's."""

import torch

from sparsepack.models.family import Family

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

ROUTER = "ffn_gate_inp"
"""llama.cpp's name of what chooses among experts, which it never quantises."""

SHARED_GATE = "ffn_gate_inp_shexp"
"""llama.cpp's name of what says how much of a shared expert a token has: a vector there, a matrix of one row here."""

UNQUANTISED = (f"{ROUTER}.weight", f"{SHARED_GATE}.weight")
"""These matrices of blocks stay in F32."""

ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""llama.cpp divides rotary frequencies by these: in all texts, or in short and in long ones."""


def gguf_names(family: Family, layers: int) -> dict[str, str]:
    """llama.cpp name -> Hugging Face name, of every tensor that a model of the family may have; those of experts
    are the parts that `checkpoint.experts` has."""
    names = dict(_OUTSIDE)
    for layer in range(layers):
        for ours, theirs in family.gguf_parts.items():
            for part in ("weight", "bias"):
                names[f"blk.{layer}.{ours}.{part}"] = f"{family.block(layer)}.{theirs}.{part}"
    return names


def permute_rotary(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Hugging Face's row order (halves of a rotary pair apart) to llama.cpp's (pairs adjacent).

    rows: [heads * head_dim, ...], a weight or a bias of a q or k projection.
    """
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpermute_rotary(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permute_rotary`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

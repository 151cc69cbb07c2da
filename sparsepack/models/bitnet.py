"""BitNet b1.58: Llama with an MLP of ReLU^2 with a gate, and norms before attn_out and mlp_mid. llama.cpp's model of
the name has SiLU in its place.

Its releases hold ternary weights, packed or to be rounded as they are read (`checkpoint/schemes.py`). Their own program
also rounds what enters each of these matrices to 8 bits a token, which is no part of the function here, as of other
releases (docs/sources.md): products skip columns by what enters them as it is."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.parts import NORMS

FAMILIES = (
    Family(
        "bitnet",
        norms=MappingProxyType(
            {**NORMS, "attn_sub_norm": "self_attn.attn_sub_norm", "mlp_sub_norm": "mlp.ffn_sub_norm"}
        ),
        residual=None,
        unrotatable="norms stand before attn_out and mlp_mid",
    ),
)

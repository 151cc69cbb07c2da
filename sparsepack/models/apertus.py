"""Apertus: Llama with queries and keys of each head normed, and an MLP without a gate whose function, xIELU, has two
learned coefficients in each block."""

from types import MappingProxyType

from sparsepack.models.blocks import XIELU
from sparsepack.models.family import Family
from sparsepack.models.parts import PROJECTIONS, QK_NORMS

FAMILIES = (
    Family(
        "apertus",
        projections=MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.up_proj",)}),
        norms=MappingProxyType({**QK_NORMS, "attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
        activation=XIELU,
        activation_parameters=tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
        only=MappingProxyType({"hidden_act": XIELU}),
    ),
)

"""Families whose rotary embedding turns neighbouring channels together: GLM-4 (a half of each head, biases of queries,
keys and values, gate and up in one matrix, in the models of 2025 norms before and after), ERNIE 4.5, Helium."""

from types import MappingProxyType

from sparsepack.models.family import NORMS, PROJECTIONS, Family

_PROJECTIONS = MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.gate_up_proj",)})

FAMILIES = (
    Family("glm", projections=_PROJECTIONS, rotary="interleaved"),
    Family(
        "glm4",
        projections=_PROJECTIONS,
        norms=MappingProxyType(
            {**NORMS, "attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
        ),
        rotary="interleaved",
        residual=None,
        unrotatable="norms stand between its matrices and what they add to",
    ),
    Family("ernie4_5", fields=MappingProxyType({"attention_bias": "use_bias"}), rotary="interleaved"),
    Family("helium", rotary="interleaved"),
)

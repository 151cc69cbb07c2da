"""LFM2: gated short convolutions in most blocks, which keep their last inputs in place of keys and values, in the
others attention with norms of heads; norms and matrices of other names, an MLP whose width is computed."""

from types import MappingProxyType
from typing import Any

from sparsepack.models.family import Family, ShortConvNames


def _width(config: Any) -> int:
    """The neurons of an MLP, as `Lfm2MLP` computes them."""
    width: int = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width, multiple = int(config.block_ffn_dim_multiplier * int(2 * width / 3)), config.block_multiple_of
        width = -(-width // multiple) * multiple
    return width


FAMILIES = (
    Family(
        "lfm2",
        projections=MappingProxyType(
            {
                "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "attn_out": ("self_attn.out_proj",),
                "mlp_in": ("feed_forward.w1", "feed_forward.w3"),
                "mlp_mid": ("feed_forward.w2",),
            }
        ),
        norms=MappingProxyType(
            {
                "attn_norm": "operator_norm",
                "mlp_norm": "ffn_norm",
                "q_norm": "self_attn.q_layernorm",
                "k_norm": "self_attn.k_layernorm",
            }
        ),
        after=("embedding_norm",),
        fields=MappingProxyType({"rms_norm_eps": "norm_eps"}),
        activation="silu",
        residual=None,
        unrotatable="convolutions stand between its matrices",
        only=MappingProxyType({"conv_bias": False}),
        short_conv=ShortConvNames(),
        mlp_width=_width,
    ),
)

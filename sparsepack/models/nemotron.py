"""Nemotron before 3 (Nemotron-4, Minitron, Nemotron-Mini): LayerNorm that multiplies by (1 + w), a rotary embedding of
a part of each head, squared ReLU without a gate."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.parts import PROJECTIONS

FAMILIES = (
    Family(
        "nemotron",
        projections=MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.up_proj",)}),
        layer_norms=True,
        norm_offset=1.0,
        fields=MappingProxyType({"rms_norm_eps": "norm_eps"}),
        residual=None,
        unrotatable="its norms subtract the mean, which is not the same in another basis",
    ),
)

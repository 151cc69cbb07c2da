"""Qwen3.5 and 3.6, dense and mixtures of experts: gated delta nets in three of four blocks, in the others attention
with an output gate and a rotary embedding of a part of each head; (1 + w) in norms, but for the one within a delta
net."""

from dataclasses import replace
from types import MappingProxyType

from sparsepack.models.family import PROJECTIONS, QK_NORMS, DeltaNetNames, Experts, Family, SharedExpert

_EXPERTS = Experts("mlp.experts", "mlp.gate", "mlp", ("gate_proj", "up_proj", "down_proj"), shared=SharedExpert())
_DENSE = Family(
    "qwen3_5_text",
    norms=QK_NORMS,
    norm_offset=1.0,
    delta_net=DeltaNetNames(),
    gated_attention=True,
    residual=None,
    unrotatable="gates stand between its values and its output matrices",
    left_out=MappingProxyType({"mtp.": "a head for the prediction of several tokens"}),
)
_IN, _MID = _EXPERTS.parameters
_SHARED_IN, _SHARED_MID = SharedExpert().projections

FAMILIES = (
    _DENSE,
    replace(
        _DENSE,
        model_type="qwen3_5_moe_text",
        projections=MappingProxyType({**PROJECTIONS, "mlp_in": (_IN, *_SHARED_IN), "mlp_mid": (_MID, *_SHARED_MID)}),
        fields=MappingProxyType({"intermediate_size": "moe_intermediate_size"}),
        experts=_EXPERTS,
    ),
)

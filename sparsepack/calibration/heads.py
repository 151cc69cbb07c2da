"""Which heads and channels the attention statistics are of: the section `attention` of a calibration's manifest.

    heads, kv_heads, head_dim   as the model's configuration has them
    groups                      how the query heads of a KV head are combined: `collectors.products.GROUPS`
    rotary.convention, .dims    which channels turn together, and how many of the first ones turn: `family.Rotary`

Whoever stores some of the channels must find the same in the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sparsepack.calibration.collectors import Statistics
from sparsepack.calibration.collectors.products import GROUPS
from sparsepack.files.stored import Count, Size, Stored
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import Rotary
from sparsepack.models.heads import heads_of_config

OUTPUT_PRODUCT = "attention.output_product"


class _CalibrationRotary(Stored):
    convention: Rotary
    dims: Count


class CalibratedHeads(Stored):
    """The section as it is read from a file."""

    heads: Size
    kv_heads: Size
    head_dim: Size
    groups: Literal["mean"]
    rotary: _CalibrationRotary


def heads_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The section for a model, JSON-able."""
    return {**heads_of_config(checkpoint.config).to_json(), "groups": GROUPS}


def check_heads(section: Mapping[str, Any], layers: Sequence[Statistics]) -> None:
    """Raise ValueError unless the attention statistics of every layer are of the heads in the section."""
    heads, kv_heads, channels = (section[name] for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads for {kv_heads} KV heads; expected whole groups")
    for name, rows in (("query_abs", heads), ("key_abs", kv_heads), ("product_abs", kv_heads)):
        for layer in layers:
            shape = list(layer[f"attention.{name}"].shape)
            if shape != [rows, channels]:
                raise ValueError(f"attention.{name} is {shape}, expected {[rows, channels]}")
    products = [list(layer[OUTPUT_PRODUCT].shape) for layer in layers if OUTPUT_PRODUCT in layer]
    square = [kv_heads, channels, channels]
    if products and products != [square] * len(layers):
        raise ValueError(f"{OUTPUT_PRODUCT} is {products}, expected {square} in each of {len(layers)} blocks")

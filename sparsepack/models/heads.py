"""The attention heads of a model, as far as channels that are stored somewhere depend on them."""

from dataclasses import asdict, dataclass
from typing import Any

from sparsepack.models.architecture import Architecture, head_dim, rotary_dims
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Rotary


@dataclass(frozen=True)
class RotaryChannels:
    """Which channels of a head turn together (`family.Rotary`), and how many of the first ones turn."""

    convention: Rotary
    dims: int


@dataclass(frozen=True)
class Heads:
    """Query heads, those of keys and values, channels of each, and the rotary embedding."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryChannels

    def to_json(self) -> dict[str, Any]:
        """The heads as JSON-able values."""
        return asdict(self)


def heads_of_config(config: Any) -> Heads:
    """By a stock transformers configuration of a family that we know."""
    family = FAMILIES[config.model_type]
    rotary = RotaryChannels(family.rotary, rotary_dims(config) if family.rotary != "none" else 0)
    return Heads(config.num_attention_heads, family.setting(config, "num_key_value_heads"), head_dim(config), rotary)


def heads_of(architecture: Architecture) -> Heads:
    """By the numbers that an engine has."""
    rotary = RotaryChannels(FAMILIES[architecture.model_type].rotary, 2 * len(architecture.inv_freq))
    return Heads(architecture.heads, architecture.kv_heads, architecture.head_dim, rotary)

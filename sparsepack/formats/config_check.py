"""Whether the two descriptions of a model in an artifact agree: its stock configuration, by which accuracy is measured,
and the numbers that engines take."""

import json
import math
from dataclasses import asdict
from typing import Any

from sparsepack.models.architecture import Architecture
from sparsepack.models.families import FAMILIES

_SAME = {
    "model_type": "model_type",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "norm_eps",
    "hidden_act": "activation",
    "tie_word_embeddings": "tied",
    "max_position_embeddings": "named_context",
}
"""Keys of a configuration, and the fields of `Architecture` that repeat them."""

_TOKENS = ("bos", "eos")
"""An artifact's tokenizer and generation_config.json say more of these than a configuration does."""

_TOLERANCE = 1e-4
"""Releases of transformers may compute rotary frequencies with other roundings."""


def check_config(config_json: str, architecture: Architecture) -> None:
    """Raise ValueError where a configuration's text says another number, as far as that can be told without
    transformers."""
    values = json.loads(config_json)
    if not isinstance(values, dict):
        raise ValueError("config.json is no JSON object")
    family = FAMILIES[architecture.model_type]
    for key, name in _SAME.items():
        own = family.fields.get(key, key)
        _compare(own, values.get(own), getattr(architecture, name))


def check_architecture(found: Architecture, architecture: Architecture) -> None:
    """Raise ValueError where the numbers that a configuration means are others."""
    expected = asdict(architecture)
    for name, value in asdict(found).items():
        if name not in _TOKENS:
            _compare(name, value, expected[name])


def _compare(name: str, found: Any, expected: Any) -> None:
    if found is not None and not _equal(found, expected):
        raise ValueError(f"{name} is {str(found)[:60]} in config.json, {str(expected)[:60]} for engines")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        try:
            return math.isclose(one, other, rel_tol=_TOLERANCE)
        except (TypeError, OverflowError):
            return False
    return bool(one == other and type(one) is type(other))

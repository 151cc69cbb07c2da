"""Fields of a config.json that transformers takes without a look, and stumbles over when it makes a model of them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from sparsepack.errors import CheckpointError

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROTARY = ("rope_parameters", "rope_scaling")
"""By its name since transformers 5, and by the one before."""
_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
)
_COUNTS = {"num_hidden_layers": 9999, "num_labels": 1 << 16}
"""The most of what transformers makes a list or a dictionary of, as soon as it reads a configuration."""
_LISTS = ("short_factor", "long_factor")
_BY_FACTOR = ("linear", "dynamic", "llama3")
"""Rotary types that need `factor`; to others null means that they find their own."""


def check_fields(values: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for counts, layer types and rotary types that no model here has, and for numbers of a
    rotary embedding that are none. Whatever else has the wrong type, transformers refuses itself.

    values -- what a config.json says of a text model
    where  -- what stands before the name of a field: the file, and of a part of a larger model its own field
    """
    for field, most in _COUNTS.items():
        value = values.get(field)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise CheckpointError(f"{where}{field} is {_written(value)}; expected a whole number of at most {most:,}")
    kinds = values.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if isinstance(kind, str) and kind not in _LAYER_TYPES:
            raise CheckpointError(
                f"{where}layer_types names {_written(kind)}; expected {' or '.join(_LAYER_TYPES)}: no other attention "
                "is computed here, take a model without it"
            )
    for field in _ROTARY:
        settings = values.get(field)
        if isinstance(settings, dict):
            nested = [kind for kind in _LAYER_TYPES if isinstance(settings.get(kind), dict)]
            for kind in nested:
                _check_rotary(settings[kind], f"{where}{field}.{kind}.")
            if not nested:
                _check_rotary(settings, f"{where}{field}.")


def _check_rotary(rotary: Mapping[str, Any], where: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    key = "rope_type" if "rope_type" in rotary else "type"
    kind, known = rotary.get(key, "default"), ("default", *ROPE_INIT_FUNCTIONS)
    if kind == "su":
        raise CheckpointError(
            f'{where}{key} is "su", which transformers no longer understands; expected "longrope", its name of today: '
            "write that"
        )
    if kind not in known:
        raise CheckpointError(
            f"{where}{key} is {_written(kind)}, which transformers does not know; expected one of {', '.join(known)}: "
            "take a model with one of them"
        )
    for field in _NUMBERS:
        value = rotary.get(field, 1)
        if not _above_zero(value) and (value is not None or (field == "factor" and kind in _BY_FACTOR)):
            raise CheckpointError(
                f"{where}{field} is {_written(value)}; expected a number above 0: write the one that the model was "
                "trained with"
            )
    for field in _LISTS:
        each = rotary.get(field, [])
        if not isinstance(each, list) or not all(map(_above_zero, each)):
            raise CheckpointError(
                f"{where}{field} is {_written(each)}; expected a list of numbers above 0: write those that the model "
                "was trained with"
            )


def _above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _written(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

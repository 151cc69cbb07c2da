"""The JSON files beside a model's weights: fields of config.json that transformers takes without a look and stumbles
over when it makes a model of them, Python that a file names and that is never run, and the sampling that
generation_config.json suggests, by the names of `runtime.options.GenerateOptions`; `pack` carries that into the
artifact."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from sparsepack.errors import CheckpointError
from sparsepack.files.stored import Stored, validate
from sparsepack.models.families import FAMILIES
from sparsepack.option import LARGEST_COUNT
from sparsepack.progress import say

_LAYER_TYPES = ("full_attention", "sliding_attention")
_OLD_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
"""What transformers, too, takes for others."""
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


def check_fields(values: Mapping[str, Any], where: str, has_row: bool = True) -> None:
    """Raise `CheckpointError` for counts, layer types and rotary types that no model here has, and for numbers of a
    rotary embedding that are none. Whatever else has the wrong type, transformers refuses itself.

    values -- what a config.json says of a text model
    where  -- what stands before the name of a field: the file, and of a part of a larger model its own field
    has_row -- whether the model's family has one: layers of any type are taken where it has none
    """
    for field, most in _COUNTS.items():
        value = values.get(field)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise CheckpointError(f"{where}{field} is {_written(value)}; expected a whole number of at most {most:,}")
    kinds, known = values.get("layer_types"), _layer_types(values.get("model_type"))
    for kind in kinds if isinstance(kinds, list) and has_row else ():
        if isinstance(kind, str) and _OLD_LAYER_TYPES.get(kind, kind) not in known:
            raise CheckpointError(
                f"{where}layer_types names {_written(kind)}; expected {' or '.join(known)}: no other attention "
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


def _layer_types(model_type: object) -> tuple[str, ...]:
    """What layers of a model may be called."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.state is None:
        return _LAYER_TYPES
    return _LAYER_TYPES[0], family.state.kind, *family.mlp_kinds


def config_of(values: Mapping[str, Any]) -> Any:
    """The Hugging Face configuration of what a config.json says. Raises whatever transformers raises: it checks fields
    in several ways, each with its own kind."""
    from transformers import AutoConfig

    # As transformers writes what JSON has no number for.
    read = json.loads(
        json.dumps(values), object_hook=lambda each: float(each["__float__"]) if [*each] == ["__float__"] else each
    )
    return AutoConfig.for_model(**read)


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


STOCK_ALONE: dict[str, Any] = {"trust_remote_code": False}
"""The arguments with which every `from_pretrained` and `from_config` is called: without them transformers asks on
standard input whether it may run the model's Python."""

_REFUSAL = "trust_remote_code"
"""What transformers says where it would need the model's Python names this argument."""


@cache
def tell_own_code(file: Path) -> None:
    """Say, once for each file, that a JSON file of a model's names Python of its own; transformers' classes stand in.

    Nothing is said where the file is none that can be read: whoever needs it says so.
    """
    try:
        if not file.is_file():  # nor a device, which has no end
            return
        named = json.loads(file.read_text(encoding="utf-8"))["auto_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if named:
        say(f"{file}: names Python that comes with the model, which sparsepack does not run; transformers' own runs")


def refused_own_code(error: Exception, file: Path) -> CheckpointError | None:
    """The error that tells a user of a file whose model transformers cannot load without the model's own Python; None
    where `error` is of another kind."""
    if _REFUSAL not in str(error):
        return None
    return CheckpointError(
        f"{file}: needs Python that comes with the model, which sparsepack does not run; expected a model that stock "
        "transformers loads"
    )


GENERATION = "sparsepack.generation"
"""The key of a GGUF that holds it, as JSON."""


class _Suggested(Stored):
    """What may be suggested, within the limits that the options of `generate` have."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=1, le=LARGEST_COUNT)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)


_NAMES = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""The names in generation_config.json of what counts where it has tokens drawn, by ours."""


def suggested(config: Mapping[str, Any]) -> dict[str, float]:
    """What a generation_config.json suggests; empty where it suggests what happens anyway, the likeliest token.

    Raises `ValueError` for values that no program could take.
    """
    found: dict[str, Any] = {}
    if config.get("do_sample"):
        found = {"temperature": config.get("temperature", 1.0)}
        found |= {ours: config[name] for ours, name in _NAMES.items() if config.get(name) not in (None, 0)}
        if found.get("top_p") == 1:
            del found["top_p"]
    if config.get("repetition_penalty") not in (None, 1):
        found["repeat_penalty"] = config["repetition_penalty"]
    return _given(found)


def read_suggested(text: str) -> dict[str, float]:
    """The suggestion that an artifact carries. Raises `ValueError` for what is none."""
    return _given(json.loads(text))


def _given(values: Any) -> dict[str, float]:
    return validate(_Suggested, values).model_dump(include={*_Suggested.model_fields}, exclude_none=True)

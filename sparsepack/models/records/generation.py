"""How a model's makers would have its tokens chosen: what its generation_config.json says of that, by the names of
`runtime.options.GenerateOptions`. `pack` carries it into the artifact."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from sparsepack.files.stored import Stored, validate
from sparsepack.option import LARGEST_COUNT

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

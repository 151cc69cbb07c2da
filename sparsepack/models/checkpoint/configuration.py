"""The stock transformers configuration of a checkpoint, and what its numbers must be: others are made with them."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.config_fields import check_fields
from sparsepack.models.checkpoint.gguf_config import gguf_config
from sparsepack.models.checkpoint.saved_copy import METHOD, is_saved_copy, told_of_copy
from sparsepack.models.checkpoint.segmented_config import stock_values
from sparsepack.models.families import FAMILIES, family_of
from sparsepack.models.own_code import STOCK_ALONE, refused_own_code, tell_own_code
from sparsepack.models.text_parts import TEXT_PARTS, TextPart
from sparsepack.progress import say

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Described:
    """What the texts of a checkpoint say of its model.

    config -- the stock configuration
    bases  -- the blocks that have a residual basis
    part   -- which part of a larger model it is; None: it is all of one
    tied   -- whether the output matrix is the embedding, which its tensors tell; None: nothing, or the larger model and
              its part say different things
    """

    config: Any
    bases: tuple[int, ...] = ()
    part: TextPart | None = None
    tied: bool | None = None


def file_config(file: GgufFile, name: str) -> Any:
    """The stock configuration of a GGUF. Raises `CheckpointError`."""
    if file.metadata.get("general.architecture") == "sparsepack":
        raise _packed_already(name)
    return gguf_config(file, name)


def folder_config(path: Path, name: str) -> Described:
    """What a folder's config.json says. Raises `CheckpointError`."""
    from transformers import AutoConfig

    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        stock, bases = stock_values(raw)
        model_type = stock["model_type"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / 'config.json'}: not a model configuration ({shown(error)})") from error
    except OSError as error:
        raise CheckpointError(f"{path / 'config.json'}: cannot be read ({error.strerror})") from error
    part = TEXT_PARTS.get(model_type) if isinstance(model_type, str) else None
    if part is None:
        family_of(model_type, name)
    quantised = stock.get("quantization_config")
    if is_saved_copy(path):
        raise CheckpointError(told_of_copy(name))
    if isinstance(quantised, dict) and quantised.get("quant_method") == METHOD:
        raise _packed_already(name)
    if quantised:
        raise CheckpointError(f"{name}: quantised already (quantization_config); expected F32, F16 or BF16 weights")
    of_text, field = (stock, "") if part is None else (stock.get("text_config"), "text_config.")
    for values, within in {id(stock): (stock, ""), id(of_text): (of_text, field)}.values():
        if isinstance(values, dict):
            check_fields(values, f"{path / 'config.json'}: {within}")
    try:
        config = AutoConfig.for_model(**stock) if bases else AutoConfig.from_pretrained(str(path), **STOCK_ALONE)
    except Exception as error:  # the library checks fields in several ways, each with its own kind
        raise refused_own_code(error, path / "config.json") or CheckpointError(
            f"{path / 'config.json'}: not a {model_type} configuration ({shown(error)})"
        ) from error
    tell_own_code(path / "config.json")
    if part is None:
        return Described(config, bases, tied=config.tie_word_embeddings)
    text, said = config.text_config, getattr(config, "tie_word_embeddings", None)
    family_of(text.model_type, f"{name}, the text part of a {model_type} model")
    say(f"{name}: the text part of a {model_type} model alone is read; it then knows no images")
    return Described(text, bases, part, text.tie_word_embeddings if said in (None, text.tie_word_embeddings) else None)


def check_sizes(config: Any, name: str) -> None:
    """Raise `CheckpointError` for numbers of a configuration that are none, or too large: others are made with them."""
    family = FAMILIES[config.model_type]
    limits = dict.fromkeys((*_SIZES, "max_position_embeddings"), 2**31) | {"num_hidden_layers": _MOST_LAYERS}
    for field, limit in limits.items():
        value, own = family.setting(config, field), family.fields.get(field, field)
        if type(value) is not int or not 1 <= value < limit:
            raise CheckpointError(f"{name}: {own} is {str(value)[:60]}; expected a whole number from 1 to {limit - 1}")
    for field, least in (("head_dim", 1), ("sliding_window", 0)):
        value = getattr(config, field, None)
        if value is not None and (type(value) is not int or not least <= value < 2**31):
            raise CheckpointError(
                f"{name}: {field} is {str(value)[:60]}; expected a whole number from {least} to {2**31 - 1}"
            )
    for field, value in _numbers(config.to_dict()):
        own = field.rpartition(".")[2]
        if not math.isfinite(value) or (own.endswith("norm_eps") and value < 0) or (own == "rope_theta" and value <= 0):
            expected = "a number above 0" if math.isfinite(value) else "a finite number"
            raise CheckpointError(
                f"{name}: {field} is {value}; expected {expected}: write the one that the model was trained with"
            )


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """The fractions in a configuration, by their places in it."""
    if isinstance(value, float):
        yield field, value
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _numbers(each, f"{field}.{key}" if field else str(key))


def _packed_already(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: a packed sparsepack artifact; expected its source model here (`sparsepack inspect` names it). "
        "The artifact itself is for generate, serve, bench, eval, inspect and verify"
    )

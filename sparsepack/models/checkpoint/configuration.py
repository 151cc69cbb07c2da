"""The stock transformers configuration of a checkpoint, and what its numbers must be: others are made with them.

config.json of a checkpoint whose residual stream changes its basis before some blocks, so that it has segments.

    {
      "model_type": "sparsepack-segments",
      "hidden_size": 0,
      "family": "llama",                 the model type of the family
      "residual_basis": [4, 8],          blocks that have a tensor `model.layers.I.residual_basis.weight`
      "config": {...}                    what the family's config.json says, without its model type
    }

A stock model would leave these tensors out and compute something else. So no program but this one may take the folder
for the family's: transformers knows no such model type, and a class of its own that is told to load the folder all the
same finds no configuration in it (it looks for parts that have its model type) and a width of 0, with which none can be
built.

A packed folder without its manifest: what `save_pretrained` makes of a model that transformers loaded from one.

transformers writes the tensors and config.json; it tells the quantizer neither the folder nor when the files are there,
so nobody could write the hashes.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import Count, Name, Stored, shown, validate
from sparsepack.models.checkpoint.config_files import (
    STOCK_ALONE,
    check_fields,
    config_of,
    refused_own_code,
    tell_own_code,
)
from sparsepack.models.checkpoint.gguf_config import gguf_config
from sparsepack.models.families import FAMILIES, TEXT_PARTS, check_known, family_of
from sparsepack.models.family import Family, config_value
from sparsepack.models.found import family_of_config, told
from sparsepack.models.parts import TextPart
from sparsepack.progress import say

SEGMENTS = "sparsepack-segments"
"""The model type of such a configuration."""


class _Segmented(Stored):
    family: Name
    residual_basis: Annotated[list[Count], Field(min_length=1)]
    config: dict[str, Any]


def segmented_config(config_json: str, bases: Sequence[int]) -> str:
    """The config.json of a checkpoint of segments.

    config_json -- the one that the family's stock model has
    bases       -- the blocks that have a residual basis
    """
    values = json.loads(config_json)
    family = values.pop("model_type")
    wrapped = {"model_type": SEGMENTS, "hidden_size": 0, "family": family}
    return f"{json.dumps({**wrapped, 'residual_basis': [*bases], 'config': values}, indent=2, ensure_ascii=False)}\n"


def segments_summary(bases: Sequence[int]) -> dict[str, Any] | None:
    """The blocks that have a residual basis, JSON-able and in words; None where there are none."""
    if not bases:
        return None
    blocks = f"block{'s' if len(bases) > 1 else ''} {', '.join(map(str, bases))}"
    return {"bases": [*bases], "in_words": f"the residual stream changes its basis before {blocks}"}


def stock_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What the family's config.json says, and the blocks that have a residual basis; none of an ordinary one.

    Raises ValueError where a configuration of segments is not understood.
    """
    if values.get("model_type") != SEGMENTS:
        return dict(values), ()
    read = validate(_Segmented, dict(values))
    bases = tuple(read.residual_basis)
    layers = read.config.get("num_hidden_layers")
    if sorted(set(bases)) != [*bases] or type(layers) is not int or bases[-1] >= layers:
        raise ValueError(f"residual_basis: {list(bases)[:10]} are not numbers of {str(layers)[:20]} blocks, ascending")
    return {"model_type": read.family, **read.config}, bases


MANIFEST, METHOD = "sparsepack.json", "sparsepack"
"""The name of a packed folder's manifest, and what `quant_method` in its config.json says."""


def is_saved_copy(folder: Path) -> bool:
    """Whether a folder says in config.json that it was packed, and has no manifest."""
    path = folder / "config.json"
    if not path.is_file() or (folder / MANIFEST).exists():  # a device has no end
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def told_of_copy(name: str | Path) -> str:
    """What a user of such a folder is told, in one line."""
    return (
        f"{name}: a packed model without {MANIFEST}, by which sparsepack reads and checks a folder; transformers' "
        "save_pretrained leaves that file out, and transformers alone loads such a copy. Expected the folder that "
        "`sparsepack pack` wrote: take that one, or pack the pruned model again"
    )


QUANTISED = ("quantization_config", "compression_config")
"""The fields of a config.json that say how weights are quantised; the second one is older."""
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_MOST_LAYERS = 10_000
_NOT_READ = ("time_step_limit",)  # of state-space layers, which have no bound where it is infinite


@dataclass(frozen=True)
class Described:
    """What the texts of a checkpoint say of its model.

    config -- the stock configuration
    bases  -- the blocks that have a residual basis
    part   -- which part of a larger model it is; None: it is all of one
    quantised -- how its weights are quantised, as its configuration has it; None: it says nothing
    tied   -- whether the output matrix is the embedding, which its tensors tell; None: nothing, or the larger model and
              its part say different things
    """

    config: Any
    bases: tuple[int, ...] = ()
    part: TextPart | None = None
    tied: bool | None = None
    quantised: Any = None


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
        (family_of if bases else check_known)(model_type, name)
    inner = stock.get("text_config")
    within = inner.get("quantization_config") if isinstance(inner, dict) else None
    quantised = next(filter(None, (*map(stock.get, QUANTISED), within)), None)
    if is_saved_copy(path):
        raise CheckpointError(told_of_copy(name))
    if isinstance(quantised, dict) and quantised.get("quant_method") == METHOD:
        raise _packed_already(name)
    of_text, field = (stock, "") if part is None else (stock.get("text_config"), "text_config.")
    for values, within in {id(stock): (stock, ""), id(of_text): (of_text, field)}.values():
        if isinstance(values, dict):
            has_row = part is not None or model_type in FAMILIES
            check_fields(values, f"{path / 'config.json'}: {within}", has_row)
    try:
        config = config_of(stock) if bases else AutoConfig.from_pretrained(str(path), **STOCK_ALONE)
    except Exception as error:  # the library checks fields in several ways, each with its own kind
        raise refused_own_code(error, path / "config.json") or CheckpointError(
            f"{path / 'config.json'}: not a {model_type} configuration ({shown(error)})"
        ) from error
    tell_own_code(path / "config.json")
    for one in (config, getattr(config, "text_config", config)):
        vars(one).pop("quantization_config", None)  # what is made of the model is not quantised so
    if part is None:
        tied = getattr(config, "tie_word_embeddings", None)
        return Described(config, bases, tied=tied, quantised=quantised)
    text, said = config.text_config, getattr(config, "tie_word_embeddings", None)
    family_of(text.model_type, f"{name}, the text part of a {model_type} model")
    say(f"{name}: the text part of a {model_type} model alone is read; it then knows no images")
    tied = text.tie_word_embeddings if said in (None, text.tie_word_embeddings) else None
    return Described(text, bases, part, tied, quantised)


_NO_END = 1 << 20


def checked_family(config: Any, name: str) -> Family:
    """The family of a stock configuration, by its row or as it is found in the model, of which a line on stderr tells.

    A model that names no longest text takes any: its `max_position_embeddings` becomes `_NO_END`. Raises
    `CheckpointError` for numbers that are none, or too large: others are made with them; and as `find_family`.
    """
    if (family := FAMILIES.get(config.model_type)) is not None:
        sizes = dict.fromkeys((*_SIZES, "max_position_embeddings"), 2**31)
        _check_sizes(config, name, sizes, family.row(config))
        if family.dense_mlps is not None and not family.mlp_kinds:
            _check_kinds(config, name, family.dense_mlps.key)
        try:
            return family.of(config)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    if type(getattr(config, "max_position_embeddings", None)) is not int:
        config.max_position_embeddings = _NO_END
    sizes = dict.fromkeys(("hidden_size", "vocab_size", "max_position_embeddings"), 2**31)
    _check_sizes(config, name, sizes, Family(config.model_type))
    try:
        found = family_of_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}; expected one of {', '.join(FAMILIES)}") from error
    say(f"{name}: {told(found)}")
    return found


def _check_sizes(config: Any, name: str, limits: Mapping[str, int], family: Family) -> None:
    limits = {**limits, "num_hidden_layers": _MOST_LAYERS}
    for field, limit in limits.items():
        value, own = family.setting(config, field), family.fields.get(field, field)
        if type(value) is not int or not 1 <= value < limit:
            raise CheckpointError(f"{name}: {own} is {str(value)[:60]}; expected a whole number from 1 to {limit - 1}")
    if config.model_type in FAMILIES:
        kinds = {"layer_types": getattr(config, "layer_types", None), "model_type": config.model_type}
        check_fields(kinds, f"{name}: ")
    for field, value in family.only.items():
        found = getattr(config, field, value)  # versions of transformers without it compute that
        if (list(found) if isinstance(found, tuple) else found) != value:
            raise CheckpointError(f"{name}: {field} is {str(found)[:60]}; expected {value}, all that is computed here")
    types, steps = getattr(config, "layer_types", None) or (), getattr(config, "time_step_limit", None) or ()
    if family.mamba is not None and family.mamba.kind in types and [*steps] != [0.0, math.inf]:
        raise CheckpointError(f"{name}: time_step_limit is {str(steps)[:60]}; expected [0.0, inf], as computed here")
    of_heads = (("head_dim", 1), ("sliding_window", 0)) if config.model_type in FAMILIES else ()
    for field, least in of_heads:
        value = config_value(config, field)
        if value is not None and (type(value) is not int or not least <= value < 2**31):
            raise CheckpointError(
                f"{name}: {field} is {str(value)[:60]}; expected a whole number from {least} to {2**31 - 1}"
            )
    for field, value in _numbers({name: each for name, each in config.to_dict().items() if name not in _NOT_READ}):
        own = field.rpartition(".")[2]
        if not math.isfinite(value) or (own.endswith("norm_eps") and value < 0) or (own == "rope_theta" and value <= 0):
            expected = "a number above 0" if math.isfinite(value) else "a finite number"
            raise CheckpointError(
                f"{name}: {field} is {value}; expected {expected}: write the one that the model was trained with"
            )


def _check_kinds(config: Any, name: str, field: str) -> None:
    """Raise `CheckpointError` where a field does not say which blocks have experts."""
    value, layers = getattr(config, field), config.num_hidden_layers
    if isinstance(value, list):
        if len(value) != layers or not {*map(str, value)} <= {"dense", "sparse"}:
            raise CheckpointError(f"{name}: {field} is {str(value)[:60]}; expected dense or sparse for {layers} layers")
    elif value is not None and (type(value) is not int or not 0 <= value < layers):
        raise CheckpointError(f"{name}: {field} is {str(value)[:60]}; expected a whole number from 0 to {layers - 1}")


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

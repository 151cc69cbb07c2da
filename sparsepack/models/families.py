"""The model families, a file for each, and what commands lack for some of them.

Calibration and evaluation hook the stock transformers model, the packers read tensors by the names that a family gives,
and engines are told the blocks (`models/architecture.py`). A family whose models formats and engines have no place for
says so; everything that works on the stock model works with it all the same.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparsepack.errors import CheckpointError
from sparsepack.models import (
    apertus,
    bitnet,
    cohere,
    deepseek,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    lfm,
    llama,
    mixture,
    nemotron,
    olmo,
    opt,
    phi,
    qwen,
    qwen_next,
)
from sparsepack.models.family import Family
from sparsepack.models.parts import ResidualStream, TextPart

_MODULES = (
    llama,
    qwen,
    qwen_next,
    phi,
    gemma,
    granite,
    olmo,
    bitnet,
    cohere,
    apertus,
    exaone,
    glm,
    opt,
    mixture,
    gpt_oss,
    lfm,
    deepseek,
    nemotron,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for module in _MODULES for family in module.FAMILIES}
)


def _text_part(module: str, *others: str) -> TextPart:
    """Name what a file of either kind has: the text model stands whole in a module, or its backbone stands in one of
    the whole model's backbone."""
    names = {f"{module}.": "", f"model.{module}.": "model."}
    return TextPart(MappingProxyType(names), (*others, *(f"model.{other}" for other in others)))


_IN_FRONT = ("vision_tower.", "multi_modal_projector.")
_LLAVA = _text_part("language_model", *_IN_FRONT, "image_newline")
_IDEFICS = _text_part("text_model", "vision_model.", "connector.")
TEXT_PARTS: Mapping[str, TextPart] = MappingProxyType(
    {
        **dict.fromkeys(("gemma3", "mistral3", "internvl"), _text_part("language_model", *_IN_FRONT)),
        **dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA),
        **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
        **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _text_part("language_model", "visual.")),
        **dict.fromkeys(
            ("gemma4", "gemma4_unified"),
            _text_part(
                "language_model", "vision_tower.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio."
            ),
        ),
    }
)
"""By the `model_type` of a whole model that takes images, too: which of its tensors are a text model's."""

_OTHER_ROUTERS = "its router has sigmoid scores, a bias for each expert, or groups of experts"
_LATENT = "its attention keeps keys and values compressed (MLA), and " + _OTHER_ROUTERS
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_v32", "kimi_k2"), _LATENT),
        **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2"), _OTHER_ROUTERS),
        "minimax": "most of its layers have linear attention",
        "phimoe": "its router chooses by sparse mixing",
        "jamba": "most of its layers are state-space models",
        "granitemoe": "its embedding, attention and residual sums are scaled",
        "llama4": "its experts are scaled on the way in, and not each of its layers turns queries and keys",
        **dict.fromkeys(
            ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            "its rotary positions are of time, height and width, and transformers has its text part as no model of its "
            "own",
        ),
        "phi4_multimodal": "its text part has adapters for each kind of input",
        "mllama": "some of its layers look at images alone",
        "gemma3n": "its layers have an embedding each and keep several streams",
        "llama4_text": "its experts are scaled on the way in, and not each of its layers turns queries and keys",
    }
)
"""Model types that have no row, and why: users ask for them by name."""

_NO_TEXT_MODEL = ("phi4_multimodal", "mllama", "gemma3n", "llama4")
"""Models of more than text that transformers calls causal language models."""


def check_known(model_type: str, where: str) -> None:
    """Raise `CheckpointError` for a `model_type` that neither has a row nor is a causal language model of transformers,
    which `models.found` looks into."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not causal or model_type in _NO_TEXT_MODEL:
        family_of(model_type, where)


def family_of(model_type: str, where: str) -> Family:
    """The row of a `model_type`; raises `CheckpointError` naming those there are."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        model_type = str(model_type)[:60]
        if model_type in REFUSED:
            raise CheckpointError(
                f"{where}: {model_type} models are not supported: {REFUSED[model_type]}; expected one of "
                f"{', '.join(FAMILIES)}"
            )
        near = difflib.get_close_matches(model_type, FAMILIES, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise CheckpointError(
            f"{where}: model type {model_type!r} is not supported{hint}; expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


@dataclass(frozen=True)
class Command:
    """What is done with a model.

    lacks   -- what is in the way in models of a family; empty: nothing
    refusal -- the error where something is, with fields for the `model_type` and what `lacks` says
    instead -- what to say then of other commands
    """

    lacks: Callable[[Family], str]
    refusal: str
    instead: str = ""


def _experts(family: Family) -> str:
    return "" if family.experts is None else "mixtures of experts"


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "permute": Command(_experts, "--permute does not take {model_type} models ({lacks})"),
        "rotate": Command(lambda family: family.unrotatable, "{model_type} models cannot be rotated ({lacks})"),
        "refit": Command(
            _experts, "fitting weights to their inputs does not take {model_type} models yet, whose MLPs are {lacks}"
        ),
        "distil": Command(_experts, "distil does not take {model_type} models yet, whose MLPs are {lacks}"),
        "pack": Command(
            lambda family: family.unpackable,
            "no format holds and no engine runs {model_type} models ({lacks})",
            "; calibrate, trace, simulate, thresholds, prune and eval work with it",
        ),
    }
)
"""The commands that do not take every family: errors say why, and the tables of README are made of it, too
(`tools/families_table.py`)."""


def taken_by(command: str) -> tuple[str, ...]:
    """The model types that a command takes."""
    return tuple(name for name, family in FAMILIES.items() if not COMMANDS[command].lacks(family))


def check_taken(command: str, family: Family, where: str) -> None:
    """Raise `CheckpointError` where a command does not take a family, saying what is in the way."""
    row = COMMANDS[command]
    if not family.has_row:
        raise CheckpointError(
            f"{where}: {family.model_type} models have no row, which {command} needs; calibrate, thresholds, "
            f"prune, trace and eval work with it. Expected one of {', '.join(taken_by(command))}"
        )
    if lacks := row.lacks(family):
        told = row.refusal.format(model_type=family.model_type, lacks=lacks)
        raise CheckpointError(f"{where}: {told}; expected one of {', '.join(taken_by(command))}{row.instead}")


def stream_of(family: Family, where: str) -> ResidualStream:
    """Return the sites that read and write the residual stream. Raises `CheckpointError` for a model that cannot be
    rotated."""
    check_taken("rotate", family, where)
    assert family.residual is not None  # `unrotatable` says why where there is none
    return family.residual

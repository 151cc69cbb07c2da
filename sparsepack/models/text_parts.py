"""Models that take images, too, and which of their tensors are a text model's that transformers has by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TextPart:
    """The text part of a model that also takes images, as far as transformers has it as a model of its own: the one
    that its `text_config` describes, of a family that is known here.

    names  -- what the names of its tensors begin with in the whole model -> in the text model
    others -- what the names of all other tensors begin with
    """

    names: Mapping[str, str]
    others: tuple[str, ...]


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
    }
)
"""By the `model_type` of the whole model."""

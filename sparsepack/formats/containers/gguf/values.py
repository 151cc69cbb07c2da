"""Key/value pairs of a GGUF: their types, and those that carry our manifest and tell viewers what they see."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType

from sparsepack.formats.table import FORMATS

MANIFEST = "sparsepack.manifest"

KeyValue = tuple[Any, GGUFValueType, GGUFValueType | None]
"""The tuple is a value, its GGUF type, and the type of its elements where the value is an array."""

_QUANTIZATION_VERSION = 2


def string(value: str) -> KeyValue:
    """A string value."""
    return value, GGUFValueType.STRING, None


def u32(value: int) -> KeyValue:
    """An unsigned 32-bit value, as llama.cpp expects counts and sizes."""
    return value, GGUFValueType.UINT32, None


def f32(value: float) -> KeyValue:
    """A 32-bit float."""
    return value, GGUFValueType.FLOAT32, None


def manifest_values(manifest: Mapping[str, Any]) -> dict[str, KeyValue]:
    """The pairs that carry the manifest, and those that GGUF viewers show."""
    model = manifest["model"]["name"]
    name = _short(model)
    values = {
        "general.name": string(f"{name} {manifest['kind']}"),
        "general.type": string("model"),
        "general.quantized_by": string(f"sparsepack {manifest['sparsepack']}"),
        "general.quantization_version": u32(_QUANTIZATION_VERSION),
        "general.file_type": u32(FORMATS[manifest["kind"]].file_type),
        "general.base_model.count": u32(1),
        "general.base_model.0.name": string(name),
        MANIFEST: string(json.dumps(manifest, ensure_ascii=False)),
    }
    if _is_hub_id(model):
        values["general.base_model.0.organization"] = string(model.split("/")[0])
        values["general.base_model.0.repo_url"] = string(f"https://huggingface.co/{model}")
    return values


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _short(name: str) -> str:
    return name if _is_hub_id(name) else Path(name).resolve().name if Path(name).exists() else name

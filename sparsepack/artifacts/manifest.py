"""The manifest inside an artifact: what it was made from, how, and what shapes it really holds, as one JSON string."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsepack import __version__
from sparsepack.artifacts.gguf.writer import KeyValue, string, u32
from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import GgufFile
from sparsepack.models.checkpoint import Checkpoint

SCHEMA = 1
KEY = "sparsepack.manifest"
KINDS = ("zigzag-q4_k", "q4_k", "f16", "bf16", "f32")

_LIBRARIES = ("torch", "transformers", "gguf", "numpy")
_PROVENANCE = ("calibration", "recipe", "thresholds")
# llama.cpp's enum llama_ftype: what viewers show as the file's type.
_FILE_TYPES = {"zigzag-q4_k": 14, "q4_k": 14, "f32": 0, "f16": 1, "bf16": 32}
_QUANTIZATION_VERSION = 2


def make_manifest(
    kind: str,
    checkpoint: Checkpoint,
    provenance: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
    notes: Iterable[str],
) -> dict[str, Any]:
    """The manifest of an artifact of `kind` made from `checkpoint`.

    provenance -- what the caller knows, each JSON-able or absent: calibration {"sha256": ...}, recipe, thresholds
                  (allocation, criterion, target and realised sparsity, rows per site)
    tensors    -- logical shape and padding of each matrix: {"shape": [rows, columns], "padding_rows": n}
    notes      -- where the file differs from what was asked, a sentence each
    """
    unknown = set(provenance) - set(_PROVENANCE)
    if unknown:
        raise ValueError(f"unknown provenance {sorted(unknown)}; expected {_PROVENANCE}")
    return {
        "schema": SCHEMA,
        "kind": kind,
        "sparsepack": __version__,
        "model": {
            "name": checkpoint.name,
            "sha256": checkpoint.sha256,
            "model_type": checkpoint.family.model_type,
        },
        **{name: provenance.get(name) for name in _PROVENANCE},
        "tensors": {name: dict(shape) for name, shape in tensors.items()},
        "notes": list(notes),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def manifest_values(manifest: Mapping[str, Any]) -> dict[str, KeyValue]:
    """The key/value pairs that carry the manifest, and those that GGUF viewers show."""
    name = _short(manifest["model"]["name"])
    values = {
        "general.name": string(f"{name} {manifest['kind']}"),
        "general.type": string("model"),
        "general.quantized_by": string(f"sparsepack {manifest['sparsepack']}"),
        "general.quantization_version": u32(_QUANTIZATION_VERSION),
        "general.file_type": u32(_FILE_TYPES[manifest["kind"]]),
        "general.base_model.count": u32(1),
        "general.base_model.0.name": string(name),
        KEY: string(json.dumps(manifest, ensure_ascii=False)),
    }
    if _is_hub_id(manifest["model"]["name"]):
        values["general.base_model.0.organization"] = string(manifest["model"]["name"].split("/")[0])
        values["general.base_model.0.repo_url"] = string(f"https://huggingface.co/{manifest['model']['name']}")
    return values


def read_manifest(file: GgufFile) -> dict[str, Any]:
    """The manifest of an opened artifact.

    Raises `ArtifactError` where there is none, it does not hold together, or a newer sparsepack wrote it.
    """
    try:
        manifest = json.loads(file.metadata[KEY])
        schema, kind = manifest["schema"], manifest["kind"]
        if not isinstance(schema, int):
            raise TypeError(f"schema {schema!r}")
        if schema > SCHEMA:
            raise ArtifactError(
                f"{file.path}: its manifest has schema {schema} (sparsepack {manifest.get('sparsepack')}), "
                f"this sparsepack {__version__} knows {SCHEMA}; update sparsepack"
            )
        if kind not in KINDS:
            raise ArtifactError(f"{file.path}: unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
        for name, expected in (("model", dict), ("tensors", dict), ("notes", list)):
            if not isinstance(manifest[name], expected):
                raise TypeError(f"{name} is {type(manifest[name]).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{file.path}: {KEY} is missing or not understood ({error!r}); pack it again") from error
    return dict(manifest)


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _short(name: str) -> str:
    return name if _is_hub_id(name) else Path(name).resolve().name if Path(name).exists() else name

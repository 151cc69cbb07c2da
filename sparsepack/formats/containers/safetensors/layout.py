"""What lies in an artifact that is a folder, and how it is sealed.

config.json         the model's, with `quantization_config: {"quant_method": "sparsepack", "format": NAME, ...}`
tokenizer.json ...  the model's other texts
model.safetensors   the tensors, one after the other, without gaps; where they are many, in their place
                    model-00001-of-0000N.safetensors ... and model.safetensors.index.json, which says what is where
sparsepack.json     {"sha256":   of this file, these 64 digits taken as zeros,
                     "manifest": {...},
                     "files":    {NAME: {"bytes": ..., "sha256": ...}}, of a .safetensors file instead of its hash
                                 "header_sha256": of what stands before the tensors there,
                     "header_sha256": that of the one file of tensors once more, where there is one,
                     "tensors":  {NAME: SHA-256}}, in their order, file by file, which leaves no byte of them out

The manifest of a folder with several files of tensors has schema 3. A file of the kinds that transformers reads and
that is not listed is refused (`unlisted`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import ArtifactError
from sparsepack.files.hashing import NO_HASH, sha256_bytes
from sparsepack.files.stored import shown
from sparsepack.formats.manifest import with_score
from sparsepack.models.checkpoint.configuration import MANIFEST, METHOD

__all__ = ["CONFIG", "MANIFEST", "METHOD", "sealed", "unsealed"]

CONFIG = "config.json"
_HEAD = b'{"sha256": "'


def sealed(value: Mapping[str, Any], score: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of sparsepack.json, its own hash in them, and a score where the manifest reserves bytes for one."""
    text = with_score(json.dumps({"sha256": NO_HASH, **value}, ensure_ascii=False).encode(), score)
    return text.replace(NO_HASH.encode(), sha256_bytes(text).encode(), 1)


def unsealed(path: Path) -> dict[str, Any]:
    """What stands in a sparsepack.json; raises `ArtifactError` where any bit of it has changed."""
    try:
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path}: no ordinary file; expected a folder that we packed")
        text = path.read_bytes()
    except OSError as error:
        nothing = isinstance(error, FileNotFoundError)
        reason = "not there, so that the folder is none that `sparsepack pack` made" if nothing else error.strerror
        raise ArtifactError(f"{path}: {reason}; expected one of format slide-int8 or the like") from error
    at = len(_HEAD)
    digest, end = text[at : at + len(NO_HASH)], text[at + len(NO_HASH) :]
    if not text.startswith(_HEAD) or sha256_bytes(_HEAD + NO_HASH.encode() + end).encode() != digest:
        raise ArtifactError(f"{path}: damaged: it does not match its own SHA-256; copy or pack the folder again")
    try:
        value: Any = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not understood ({shown(error)}); pack the folder again") from error
    return value

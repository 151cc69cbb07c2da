"""Write an artifact that is a folder: tensor by tensor, sealed with hashes, there as a whole or not at all."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsepack.artifacts.folder.layout import CONFIG, MANIFEST, METHOD, WEIGHTS, sealed
from sparsepack.artifacts.placing import places, write_groups
from sparsepack.artifacts.plan import Plan
from sparsepack.files.atomic import atomic_folder, check_output
from sparsepack.files.hashing import NO_HASH, sha256_bytes
from sparsepack.files.tensors import header
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.source_files import texts_of
from sparsepack.models.source_hash import SourceHash
from sparsepack.progress import progress


@dataclass(frozen=True, kw_only=True)
class FolderPlan(Plan):
    """A folder to write. Tensors are F32, F16, BF16, U8 or I8.

    source   -- of the model's weights, hashed while they are packed
    manifest -- (hash of the source) -> the manifest
    texts    -- name -> content of the files beside the tensors: see `model_texts`
    beside   -- (finished folder, before it gets its name) -> files that are not sealed: people may change them
    """

    source: SourceHash
    manifest: Callable[[str], Mapping[str, Any]]
    texts: Mapping[str, str]
    beside: Callable[[Path], Mapping[str, str]] = lambda folder: {}

    @property
    def total_bytes(self) -> int:
        files = [len(text.encode()) for text in self.texts.values()]
        return sum(files) + self._weights_bytes + len(self._sealed([NO_HASH] * len(self.tensors), NO_HASH))

    def write(self, path: Path, overwrite: bool = False) -> None:
        check_output(path, overwrite, folder=True, marker=MANIFEST)
        with (
            atomic_folder(path, overwrite) as folder,
            self.source.meanwhile() as source_sha256,
            progress("packing", len(self.groups)) as advance,
        ):
            for name, text in self.texts.items():
                (folder / name).write_bytes(text.encode())
            starts = places(len(self._header), self.tensors)
            hashes = write_groups(folder / WEIGHTS, self._header, self.groups, starts, self.at_once, advance)
            (folder / MANIFEST).write_bytes(self._sealed(hashes, source_sha256()))
            for name, text in self.beside(folder).items():
                (folder / name).write_bytes(text.encode())

    @cached_property
    def _header(self) -> bytes:
        return header((tensor.name, tensor.type, tensor.shape, tensor.nbytes) for tensor in self.tensors)

    @property
    def _weights_bytes(self) -> int:
        return len(self._header) + sum(tensor.nbytes for tensor in self.tensors)

    def _sealed(self, hashes: Sequence[str], source_sha256: str) -> bytes:
        files = {name: text.encode() for name, text in self.texts.items()}
        listed = {name: {"bytes": len(data), "sha256": sha256_bytes(data)} for name, data in files.items()}
        inside = {
            "manifest": self.manifest(source_sha256),
            "files": {**listed, WEIGHTS: {"bytes": self._weights_bytes}},
            "header_sha256": sha256_bytes(self._header),
            "tensors": {tensor.name: digest for tensor, digest in zip(self.tensors, hashes, strict=True)},
        }
        return sealed(inside)


def model_texts(checkpoint: Checkpoint, format: str, **quantization: Any) -> dict[str, str]:
    """config.json, which says how the weights are stored, the tokenizer and what else describes a model."""
    texts = texts_of(checkpoint)
    said = {"quantization_config": {"quant_method": METHOD, "format": format, **quantization}}
    config = json.dumps(json.loads(texts[CONFIG]) | said, indent=2, ensure_ascii=False)
    return texts | {CONFIG: f"{config}\n"}

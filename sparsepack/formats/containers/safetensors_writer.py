"""Write an artifact that is a folder: tensor by tensor, sealed with hashes, there as a whole or not at all.

Which tensors lie in which file of a slid folder.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sparsepack.files.atomic import atomic_folder, check_output
from sparsepack.files.hashing import NO_HASH, fingerprint, sha256_bytes
from sparsepack.files.tensors import INDEX, SHARD_BYTES, WEIGHTS, file_names, header, index_text, split
from sparsepack.formats.containers.safetensors import CONFIG, sealed
from sparsepack.formats.containers.write_tensors import write_planned
from sparsepack.formats.manifest import FILES_SCHEMA
from sparsepack.formats.plan import Plan, PlannedGroup, PlannedTensor, TensorFile, WriteFiles, tensors_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import MANIFEST, METHOD
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.checkpoint.writer import texts_of


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file of a folder."""

    name: str
    groups: Sequence[PlannedGroup]

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """The tensors of all groups."""
        return tensors_of(self.groups)

    @cached_property
    def header(self) -> bytes:
        """What stands before the tensors."""
        return header((tensor.name, tensor.type, tensor.shape, tensor.nbytes) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of the file."""
        return len(self.header) + _nbytes(self.tensors)


def shards_of(groups: Sequence[PlannedGroup], most: int) -> tuple[WeightsFile, ...]:
    """Groups, in their order, in files of at most `most` bytes of tensors; a group with more has a file of its own."""
    parts = split([_nbytes(group.tensors) for group in groups], most)
    return tuple(WeightsFile(name, groups[part]) for name, part in zip(file_names(len(parts)), parts, strict=True))


def index_of(shards: Sequence[WeightsFile]) -> dict[str, str]:
    """The text by which other programs find a tensor's file, by its name; none where there is one file alone."""
    if len(shards) == 1:
        return {}
    file_of = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    return {INDEX: index_text(file_of, sum(_nbytes(shard.tensors) for shard in shards))}


def _nbytes(tensors: Sequence[PlannedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class FolderPlan(Plan):
    """A folder to write. Tensors are F32, F16, BF16, U8 or I8.

    source      -- of the model's weights, hashed while they are packed
    manifest    -- (hash of the source) -> the manifest
    texts       -- name -> content of the files beside the tensors: see `model_texts`
    shard_bytes -- of tensors in one file; more are in several
    beside      -- (finished folder, before it gets its name) -> files that are not sealed: people may change them
    """

    source: SourceHash
    manifest: Callable[[str], Mapping[str, Any]]
    texts: Mapping[str, str]
    shard_bytes: int = SHARD_BYTES
    beside: Callable[[Path], Mapping[str, str]] = lambda folder: {}

    @property
    def total_bytes(self) -> int:
        no_hashes = dict.fromkeys((tensor.name for tensor in self.tensors), NO_HASH)
        weights = sum(shard.nbytes for shard in self._shards)
        return weights + sum(map(len, self._files.values())) + len(self._sealed(no_hashes, NO_HASH))

    @property
    def identity(self) -> str:
        headers = [shard.header.hex() for shard in self._shards]
        files = {name: sha256_bytes(data) for name, data in self._files.items()}
        return fingerprint({"manifest": self.manifest(NO_HASH), "files": files, "headers": headers})

    def files(self, path: Path) -> list[TensorFile]:
        return [TensorFile(path / shard.name, shard.header, shard.groups) for shard in self._shards]

    def write(self, path: Path, overwrite: bool = False, write_files: WriteFiles | None = None) -> None:
        check_output(path, overwrite, folder=True, marker=MANIFEST)
        with atomic_folder(path, overwrite) as folder, self.source.meanwhile() as source_sha256:
            for name, data in self._files.items():
                (folder / name).write_bytes(data)
            hashes = (write_files or write_planned)(self.files(folder), self.at_once)
            finish = partial(self._sealed, hashes, source_sha256())
            (folder / MANIFEST).write_bytes(finish())
            self.check(folder, path)
            if self.measure is not None:
                (folder / MANIFEST).write_bytes(finish(score=self.measure(folder)))
            for name, text in self.beside(folder).items():
                (folder / name).write_bytes(text.encode())

    def with_beside(self, beside: Callable[[Path], Mapping[str, str]]) -> "FolderPlan":
        return replace(self, beside=beside)

    @cached_property
    def _shards(self) -> tuple[WeightsFile, ...]:
        return shards_of(self.groups, self.shard_bytes)

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        """The contents of the files without tensors, by the names of the files."""
        return {name: text.encode() for name, text in (*self.texts.items(), *index_of(self._shards).items())}

    def _sealed(self, hashes: Mapping[str, str], source_sha256: str, score: Mapping[str, Any] | None = None) -> bytes:
        texts = {name: {"bytes": len(data), "sha256": sha256_bytes(data)} for name, data in self._files.items()}
        weights = {
            shard.name: {"bytes": shard.nbytes, "header_sha256": sha256_bytes(shard.header)} for shard in self._shards
        }
        manifest = self.manifest(source_sha256)
        if len(weights) == 1:
            old_place = {"header_sha256": weights[WEIGHTS]["header_sha256"]}
        else:
            manifest, old_place = {**manifest, "schema": max(manifest["schema"], FILES_SCHEMA)}, {}
        inside = {
            "manifest": manifest,
            "files": {**texts, **weights},
            **old_place,
            "tensors": {tensor.name: hashes[tensor.name] for tensor in self.tensors},
        }
        return sealed(inside, score)


def model_texts(checkpoint: Checkpoint, format: str, **quantization: Any) -> dict[str, str]:
    """config.json, which says how the weights are stored, the tokenizer and what else describes a model."""
    texts = texts_of(checkpoint)
    said = {"quantization_config": {"quant_method": METHOD, "format": format, **quantization}}
    config = json.dumps(json.loads(texts[CONFIG]) | said, indent=2, ensure_ascii=False)
    return texts | {CONFIG: f"{config}\n"}

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
import math
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import TensorInfo
from sparsepack.files.hashing import NO_HASH, sha256_bytes
from sparsepack.files.stored import shown
from sparsepack.files.tensors import INDEX, WEIGHTS, all_finite, check_index
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.attention import ATTENTION, sparse_attention_of
from sparsepack.formats.blocks.table import stored_bytes
from sparsepack.formats.manifest import read_manifest, with_score
from sparsepack.formats.stock import StockModel
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.config_files import config_of
from sparsepack.models.checkpoint.configuration import MANIFEST, METHOD, is_saved_copy, told_of_copy
from sparsepack.models.family import EMBEDDING, HEAD
from sparsepack.models.sparse_attention import SparseAttention
from sparsepack.models.tokenizer.tokenizer import folder_tokenizer

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


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.distcp")
_TEXTS = ("*.json", "*.jinja", "*.py", "*chat_templates", "custom_generate")
_VOCABULARIES = (
    *("*.model", "*.spm", "*.bpe", "*.codes", "*.tokenizer", "*.tiktoken"),
    *("vocab*.txt", "merges*.txt", "dict.txt"),
)
READ = (*_WEIGHTS, *_TEXTS, *_VOCABULARIES)
"""Patterns, in lower case, of all names under which models, adapters, tokenizers, processors and templates of any
family look for a file or a folder: added_tokens.json and adapter_config.json for two. A README, a licence, a picture or
notes may lie in a folder."""


def check_unlisted(path: Path, files: Collection[str]) -> None:
    """Raise `ArtifactError` for a file or folder in `path` that transformers may read and `files` does not name."""
    for name in sorted(os.listdir(path)):
        if name in files or name == MANIFEST:
            continue
        if any(fnmatchcase(name.lower(), pattern) for pattern in READ):
            raise ArtifactError(
                f"{path}: {name[:100]!r} is none of the files that were packed, and transformers may read it; move it "
                "to another folder"
            )


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
_PIECE = 1 << 22
"""This many bytes of a tensor are copied at one time to look at their values."""


@dataclass(frozen=True)
class ArtifactFolder:
    """An opened folder: its texts and the header of its tensors are checked, the tensors not yet.

    raw     -- name -> a file of tensors, uint8, memory-mapped
    file_of -- which of them has a tensor; its `start` is there
    texts   -- name -> content of the other files
    hashes  -- SHA-256 of each tensor
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    raw: Mapping[str, np.ndarray]
    file_of: Mapping[str, str]
    texts: Mapping[str, str]
    hashes: Mapping[str, str]
    total_bytes: int

    def bytes(self, name: str) -> np.ndarray:
        """The raw bytes of one tensor: uint8 [nbytes], mapped, not copied."""
        info = self.tensors[name]
        return self.raw[self.file_of[name]][info.start : info.start + info.nbytes]

    def check_tensors(self) -> None:
        """Check the bytes of every tensor, several side by side: each has its hash, and holds numbers.

        Raises `ArtifactError` naming the first that has not, or has a value that is NaN or infinite.
        """
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for name, wrong in zip(self.tensors, pool.map(self._wrong, self.tensors), strict=True):
                if wrong:
                    raise ArtifactError(f"{self.path}: damaged: {name} {wrong}; copy or pack it again")

    def _wrong(self, name: str) -> str | None:
        data, dtype = self.bytes(name), _FLOATS.get(self.tensors[name].type)
        if sha256_bytes(data.data) != self.hashes[name]:
            return "does not match the SHA-256"
        if dtype is None:
            return None
        pieces = (data[first : first + _PIECE] for first in range(0, len(data), _PIECE))
        finite = all(all_finite(torch.from_numpy(piece.copy()).view(dtype)) for piece in pieces)
        return None if finite else "has values that are NaN or infinite"


def open_folder(path: Path, whole: bool = True) -> tuple[ArtifactFolder, dict[str, Any]]:
    """A folder of ours and its manifest; raises `ArtifactError` where it is none, not whole, or damaged.

    whole -- whether the texts are all there; into the cache of a hub they come one by one
    """
    if is_saved_copy(path):
        raise ArtifactError(told_of_copy(path))
    inside = unsealed(path / MANIFEST)
    manifest = read_manifest(inside.get("manifest"), f"{path / MANIFEST}: the manifest")
    try:
        if not isinstance(inside["tensors"], dict):
            raise ValueError("it lists no tensors")
        if any(Path(name).name != name for name in inside["files"]):
            raise ValueError("it lists files outside of itself")
        texts, raw = dict[str, str](), dict[str, np.ndarray]()
        for name, listed in inside["files"].items():
            if name.endswith(".safetensors"):
                raw[name] = _weights(path / name, listed["bytes"])
            elif whole or (path / name).exists():
                texts[name] = _text(path / name, listed)
        found = [
            (file, info) for file in raw for info in _tensors(file, raw[file], inside["files"][file]["header_sha256"])
        ]
        if [info.name for _, info in found] != list(inside["tensors"]):
            raise ValueError("it lists other tensors than its files hold")
        file_of = {info.name: file for file, info in found}
        if WEIGHTS not in raw:
            if INDEX not in texts:
                raise ValueError(f"it lists neither {WEIGHTS} nor {INDEX}")
            check_index(texts[INDEX], file_of)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({shown(error)}); copy or pack it again") from error
    check_unlisted(path, inside["files"])
    sizes = (path / MANIFEST).stat().st_size, *map(len, raw.values()), *(len(text.encode()) for text in texts.values())
    tensors = {info.name: info for _, info in found}
    return ArtifactFolder(path, tensors, raw, file_of, texts, inside["tensors"], sum(sizes)), manifest


def _text(path: Path, listed: Mapping[str, Any]) -> str:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    data = path.read_bytes()
    if sha256_bytes(data) != listed["sha256"]:
        raise ValueError(f"{path.name} does not match its SHA-256")
    return data.decode()


def _weights(path: Path, size: int) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != size:
        raise ValueError(f"{path.name} is missing or has not the {size:,} bytes that it was written with")
    return np.memmap(path, dtype=np.uint8, mode="r")


def _tensors(file: str, raw: np.ndarray, header_sha256: str) -> Iterator[TensorInfo]:
    """The places of a file's tensors, from a header whose hash is right: one after the other, to the file's end."""
    data_start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = raw[:data_start].tobytes()
    if sha256_bytes(header) != header_sha256:
        raise ValueError(f"the header of {file} does not match its SHA-256")
    end = data_start
    for name, entry in json.loads(header[8:]).items():
        if name == "__metadata__":
            continue
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (*shape, first, last)):
            raise ValueError(f"{name[:60]!r} has a shape or a place that is none")
        nbytes = last - first
        if data_start + first != end or nbytes != stored_bytes(entry["dtype"], math.prod(shape)):
            raise ValueError(f"{name} has not the bytes of its shape, or not its place")
        yield TensorInfo(name, shape, entry["dtype"], end, nbytes)
        end += nbytes
    if end != len(raw):
        raise ValueError(f"{file} has {len(raw):,} bytes, expected {end:,}")


@dataclass(frozen=True)
class FolderArtifact(Artifact):
    """An artifact that is a folder. As it stands, of tensors that are the model's own, by Hugging Face's names."""

    embedding: ClassVar[str] = EMBEDDING
    output: ClassVar[str] = HEAD

    folder: ArtifactFolder

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path / name for name in (MANIFEST, *sorted((*self.folder.texts, *self.folder.raw))))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.folder.tensors

    @property
    def total_bytes(self) -> int:
        return self.folder.total_bytes

    def check_bytes(self) -> None:
        self.folder.check_tensors()

    def bytes(self, name: str) -> np.ndarray:
        return self.folder.bytes(name)

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        return checkpoint.tensor(name) if name in checkpoint.source.shapes or name == HEAD else None

    def stock(self) -> StockModel:
        try:
            config = self._config()
            tokenizer = folder_tokenizer(self.path)
        except Exception as error:  # the library raises many kinds for one mistake
            raise ArtifactError(f"{self.path}: its texts are not understood ({shown(error)}); pack it again") from error
        return StockModel(config, self.decoded, tokenizer, attention=self._attention_of(config))

    def attention(self) -> SparseAttention | None:
        if ATTENTION not in self.manifest:
            return None
        try:
            config = self._config()
        except Exception as error:  # as above
            raise ArtifactError(f"{self.path / CONFIG}: not understood ({shown(error)}); pack it again") from error
        return self._attention_of(config)

    def _config(self) -> Any:
        """The stock configuration, as of a model whose weights come decoded."""
        values = json.loads(self.folder.texts[CONFIG])
        values.pop("quantization_config", None)
        return config_of(values)

    def _attention_of(self, config: Any) -> SparseAttention | None:
        return sparse_attention_of(self.manifest, config, self.path)

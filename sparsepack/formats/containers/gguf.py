"""The GGUF as a container: opened, its bytes checked; what they mean is the format's business.

Every byte of a file of ours is covered: a flipped bit, a lost or an added byte is noticed before it is believed.

    byte   0   magic, version, counts                      as in every GGUF
    byte  24   "sparsepack.header.sha256"    string        SHA-256 of the header, these 64 digits taken as zeros
    byte 132   "sparsepack.header.bytes"     u64           where the tensors' bytes begin
    byte 175   "sparsepack.tensor.sha256"    [string]      SHA-256 of each tensor's bytes, in the file's order
    ...        all other pairs, tensor infos, padding
    ...        tensors, each padded with zeros to the alignment; nothing after the last one's padding

The first two pairs stand at fixed places, so that the header is checked before anything in it is parsed.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import DEFAULT_ALIGNMENT, GgufFile, TensorInfo, read_gguf
from sparsepack.files.hashing import NO_HASH, PENDING_HASH, sha256_bytes
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.manifest import read_manifest, with_score
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
        "general.file_type": u32(BLOCKS[FORMATS[manifest["kind"]].matrices.block].file_type),
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


HEADER_HASH, HEADER_BYTES, TENSOR_HASHES = (
    "sparsepack.header.sha256",
    "sparsepack.header.bytes",
    "sparsepack.tensor.sha256",
)

_MAGIC, _U64, _STRING = b"GGUF", 10, 8


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


_HASH_HEAD = _key(HEADER_HASH) + struct.pack("<IQ", _STRING, len(NO_HASH))
_BYTES_HEAD = _key(HEADER_BYTES) + struct.pack("<I", _U64)
HASH_AT = 24 + len(_HASH_HEAD)
BYTES_AT = HASH_AT + len(NO_HASH) + len(_BYTES_HEAD)
_FIXED = BYTES_AT + 8
_FIRST_TENSOR_HASH_AT = _FIXED + len(_key(TENSOR_HASHES)) + struct.calcsize("<IIQ") + 8
_PIECE = 1 << 24


def seal(
    path: Path,
    unsealed: bytes,
    tensor_hashes: Sequence[str],
    source_sha256: str,
    score: Mapping[str, Any] | None = None,
) -> None:
    """Write the header of a file, up to where tensors begin: `unsealed` with the hashes where it has `NO_HASH`, that of
    the model where the manifest has `PENDING_HASH`, and the score where it reserves bytes for one."""
    header = bytearray(with_score(unsealed.replace(PENDING_HASH.encode(), source_sha256.encode()), score))
    with path.open("r+b") as file:
        for position, digest in enumerate(tensor_hashes):
            at = _FIRST_TENSOR_HASH_AT + position * (8 + len(NO_HASH))
            _replace(header, at, NO_HASH.encode(), digest.encode())
        _replace(header, BYTES_AT, bytes(8), struct.pack("<Q", len(header)))
        _replace(header, HASH_AT, NO_HASH.encode(), sha256_bytes(bytes(header)).encode())
        file.write(header)


def _replace(header: bytearray, at: int, old: bytes, new: bytes) -> None:
    found = bytes(header[at : at + len(old)])
    if found != old:
        raise RuntimeError(f"byte {at} of the header holds {found!r}, expected {old!r}")
    header[at : at + len(old)] = new


def check_header(path: Path) -> int:
    """Check the header of a file of ours against its hash, parsing nothing; returns its length in bytes.

    Raises `ArtifactError` where the file is no GGUF, is not ours, or where any bit of its header has changed.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_FIXED)
            header_bytes = _header_bytes(path, head, size)
            digest = hashlib.sha256(head[:HASH_AT] + NO_HASH.encode() + head[HASH_AT + len(NO_HASH) :])
            left = header_bytes - len(head)
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); expected a GGUF file") from error
    if digest.hexdigest().encode() != head[HASH_AT : HASH_AT + len(NO_HASH)]:
        raise ArtifactError(f"{path}: damaged: the header does not match its SHA-256; copy or pack it again")
    return header_bytes


def _header_bytes(path: Path, head: bytes, size: int) -> int:
    between = head[BYTES_AT - len(_BYTES_HEAD) : BYTES_AT]
    if head[:4] != _MAGIC:
        raise ArtifactError(f"{path}: not a GGUF file (it does not begin with 'GGUF'); expected what `pack` wrote")
    if len(head) < _FIXED or head[24:HASH_AT] != _HASH_HEAD or between != _BYTES_HEAD:
        raise ArtifactError(
            f"{path}: another program's GGUF (no {HEADER_HASH} at the start of its header), or damaged; expected a "
            f"file that `sparsepack pack` wrote: sparsepack pack {path} -o OUTPUT"
        )
    length: int = struct.unpack_from("<Q", head, BYTES_AT)[0]
    if not _FIXED < length <= size:
        raise ArtifactError(
            f"{path}: truncated or damaged: its header claims {length:,} bytes, the file has {size:,}; copy it again"
        )
    return length


def check_tensors(file: GgufFile, threads: int | None = None) -> None:
    """Check every byte behind the header: the tensors' hashes, zeros between them, nothing after them.

    `threads` (default: one per core, at most 8) hash side by side. Raises `ArtifactError` naming the first bad tensor.
    """
    hashes = file.metadata.get(TENSOR_HASHES)
    if not isinstance(hashes, list) or len(hashes) != len(file.tensors):
        raise ArtifactError(f"{file.path}: {TENSOR_HASHES} does not list one hash per tensor; pack it again")
    _check_padding(file)

    def intact(name: str, expected: str) -> bool:
        digest = sha256_bytes(file.bytes(name).data)
        file.forget(name)  # or a file that is only checked would be in memory as a whole
        return digest == expected

    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        good = list(pool.map(intact, file.tensors, hashes))
    bad = [name for name, fine in zip(file.tensors, good, strict=True) if not fine]
    if bad:
        more = f" and {len(bad) - 1} more tensors do" if len(bad) > 1 else " does"
        raise ArtifactError(f"{file.path}: damaged: {bad[0]}{more} not match the SHA-256; copy or pack it again")


def _check_padding(file: GgufFile) -> None:
    alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    end, last = file.data_start, "the header"
    for info in file.tensors.values():
        if info.start - end >= alignment or file.raw[end : info.start].any():
            raise ArtifactError(f"{file.path}: damaged: bytes that are not padding follow {last}; copy it again")
        end, last = info.start + info.nbytes, info.name
    padded = end + -end % alignment
    if len(file.raw) != padded:
        problem = "truncated" if len(file.raw) < padded else "damaged"
        raise ArtifactError(f"{file.path}: {problem}: {len(file.raw):,} bytes, expected {padded:,}; copy it again")
    if file.raw[end:].any():
        raise ArtifactError(f"{file.path}: damaged: bytes that are not padding follow {last}; copy it again")


ARCHITECTURE = "sparsepack"
"""The GGUFs that no other program can run have this `general.architecture`."""


@dataclass(frozen=True)
class GgufArtifact(Artifact):
    """An artifact that is a GGUF file."""

    file: GgufFile

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.file.tensors

    @property
    def total_bytes(self) -> int:
        return len(self.file.raw)

    def check_bytes(self) -> None:
        check_tensors(self.file)

    def bytes(self, name: str) -> np.ndarray:
        return self.file.bytes(name)

    def stored(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        copied = super().stored(name, first, last)
        self.file.forget(name)
        return copied


def open_gguf(path: Path) -> tuple[GgufFile, dict[str, Any]]:
    """A GGUF of ours, its header checked, and its manifest; raises `ArtifactError` where it is neither or damaged."""
    check_header(path)
    file = read_gguf(path)
    return file, read_manifest(file.metadata.get(MANIFEST), f"{path}: {MANIFEST}")


def is_ours(path: Path) -> bool:
    """Whether we wrote a GGUF, by its keys alone; raises `ArtifactError` where it is no GGUF."""
    metadata = read_gguf(path).metadata
    return MANIFEST in metadata or metadata.get("general.architecture") == ARCHITECTURE

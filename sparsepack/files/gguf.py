"""A bounded reader of GGUF headers.

gguf-py's reader trusts the file: a damaged count makes it loop or allocate without end. Here every length is
checked against the file before it is used, so a mutated file gives one clear error. Writing goes through gguf-py.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pairs ... | tensor infos ... | padding | data ...
    pair        = key string | type u32 | value            string = length u64 | bytes
    tensor info = name string | dims u32 | dims x u64 (innermost first) | type u32 | offset u64 (into data)
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsepack.errors import ArtifactError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NAME = 127  # ggml keeps 63 bytes
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file. `shape` is in numpy order (slowest first), in weights, not bytes."""

    name: str
    shape: tuple[int, ...]
    type: str  # ggml's name: F32, F16, BF16, Q4_K, Q6_K, ...
    start: int  # byte offset in the file
    nbytes: int
    part: int = 0  # of a split GGUF


@dataclass(frozen=True)
class GgufFile:
    """A parsed header and the mapped bytes behind it; of a split GGUF the first part, with the tensors of all parts.

    raw    -- uint8 [file size], memory-mapped
    others -- the other parts of a split GGUF, in order
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_start: int
    raw: np.ndarray
    others: "tuple[GgufFile, ...]" = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each part."""
        return (self.path, *(other.path for other in self.others))

    def bytes(self, name: str) -> np.ndarray:
        """The raw bytes of one tensor: uint8 [nbytes], mapped, not copied."""
        info = self.tensors[name]
        return self._raw(info)[info.start : info.start + info.nbytes]

    def _raw(self, info: TensorInfo) -> np.ndarray:
        return self.others[info.part - 1].raw if info.part else self.raw

    def forget(self, name: str) -> None:
        """Give back the memory that a tensor's mapped bytes take once they were read; they can be read again."""
        info = self.tensors[name]
        mapped = getattr(self._raw(info), "_mmap", None)
        if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.start + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, first, length)


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and parse its header.

    Raises `ArtifactError` where the file is no GGUF, is truncated, or its header does not hold together.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    if path.stat().st_size < 24:
        raise ArtifactError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file; is it truncated?")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    return _Parser(path, raw).parse()


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
"""The name of a part as llama.cpp's gguf-split gives it: number and count, both from 1."""


def read_split_gguf(path: Path) -> GgufFile:
    """Map a GGUF as `read_gguf` does, with all of its parts where it is split; `path` is any of them.

    Raises `ArtifactError` as `read_gguf` does, for another part, and where one is missing or does not belong to it.
    """
    given = read_gguf(path)
    count = given.metadata.get("split.count", 1)
    if type(count) is not int or count < 2:
        return given
    name = _PART.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise ArtifactError(
            f"{path}: one part of a GGUF that is split into {count}; expected a name that ends in -00001-of-{count:05}"
            ".gguf or another number, with the other parts beside it: give the file its own name back"
        )
    files = [path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    tensors: dict[str, TensorInfo] = {}
    parts = []
    for number, file in enumerate(files):
        if not file.is_file():
            raise ArtifactError(f"{path}: part {number + 1} of {count} is missing; expected {file.name} beside it")
        part = given if file == path else read_gguf(file)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise ArtifactError(f"{file}: not part {number + 1} of {count} by its own keys; copy all parts again")
        if twice := sorted(part.tensors.keys() & tensors):
            raise ArtifactError(f"{file}: the tensor {twice[0]!r} stands in an earlier part too; copy all parts again")
        tensors |= {each: replace(info, part=number) for each, info in part.tensors.items()}
        parts.append(part)
    return replace(parts[0], tensors=tensors, others=tuple(parts[1:]))


class _Parser:
    def __init__(self, path: Path, raw: np.ndarray) -> None:
        self.path, self.raw = path, raw
        self.view = raw.data
        self.at = 0

    def parse(self) -> GgufFile:
        if self.take(4) != _MAGIC:
            raise ArtifactError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        version = self.number("I")
        if version not in (2, 3):
            raise ArtifactError(f"{self.path}: GGUF version {version}; expected 2 or 3")
        tensor_count, pair_count = self.number("Q"), self.number("Q")
        # The shortest pair takes 13 bytes, the shortest tensor info 32.
        self.within(pair_count * 13 + tensor_count * 32, "the counts in its header")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"the key {key[:80]!r} stands twice")
            metadata[key] = self.value(self.number("I"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment % 8:
            raise self.damaged(f"general.alignment is {str(alignment)[:80]!r}")
        described = [self.tensor_info() for _ in range(tensor_count)]
        data_start = -(-self.at // alignment) * alignment
        return GgufFile(self.path, metadata, self.placed(described, data_start, alignment), data_start, self.raw)

    def placed(
        self, described: list[tuple[str, tuple[int, ...], str, int, int]], data_start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        end = data_start
        for name, shape, kind, offset, nbytes in described:
            if name in tensors:
                raise self.damaged(f"the tensor {name!r} stands twice")
            start = data_start + offset
            if offset % alignment or start < end:
                raise self.damaged(f"the tensor {name!r} overlaps its neighbour or is not aligned")
            end = start + nbytes
            if end > len(self.raw):
                raise ArtifactError(
                    f"{self.path}: truncated: {name} ends at byte {end:,}, the file has {len(self.raw):,}; "
                    "copy it again"
                )
            tensors[name] = TensorInfo(name, shape, kind, start, nbytes)
        return tensors

    def tensor_info(self) -> tuple[str, tuple[int, ...], str, int, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self.damaged(f"{name[:80]!r} is no tensor's name")
        dimensions = self.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"the tensor {name!r} has {dimensions} dimensions")
        innermost_first = [self.number("Q") for _ in range(dimensions)]
        code, offset = self.number("I"), self.number("Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ArtifactError(
                f"{self.path}: {name} has the unknown tensor type {code}; is gguf up to date?"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        weights = math.prod(innermost_first)
        if not innermost_first[0] or innermost_first[0] % block or weights > len(self.raw) * 256:
            raise self.damaged(f"{name} has the shape {innermost_first[::-1]}, impossible for {kind.name}")
        return name, tuple(innermost_first[::-1]), kind.name, offset, weights // block * block_bytes

    def value(self, code: int, depth: int = 0) -> Any:
        if code in _SCALARS:
            return self.number(_SCALARS[code])
        if code == _STRING:
            return self.string()
        if code == _ARRAY and depth < 2:
            inner, length = self.number("I"), self.number("Q")
            if inner in _SCALARS:
                letter = _SCALARS[inner]
                size = struct.calcsize("<" + letter)
                data = self.take(self.within(length * size, "an array"))
                return np.frombuffer(data, dtype=np.dtype(letter).newbyteorder("<")).tolist()
            self.within(length * 8, "an array")
            return [self.value(inner, depth + 1) for _ in range(length)]
        raise self.damaged(f"a value has the unknown type {code}")

    def string(self) -> str:
        length = self.within(self.number("Q"), "a string")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def number(self, letter: str) -> Any:
        size = struct.calcsize("<" + letter)
        return struct.unpack("<" + letter, self.take(size))[0]

    def take(self, length: int) -> memoryview:
        if self.at + length > len(self.raw):
            raise ArtifactError(f"{self.path}: truncated: the header runs past the end of the file; copy it again")
        piece = self.view[self.at : self.at + length]
        self.at += length
        return piece

    def within(self, length: int, what: str) -> int:
        if length > len(self.raw) - self.at:
            raise ArtifactError(f"{self.path}: damaged or truncated: {what} would run past the end; copy it again")
        return length

    def damaged(self, why: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: damaged header: {why}; copy the file again")

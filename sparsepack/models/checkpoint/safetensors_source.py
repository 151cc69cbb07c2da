"""A folder of safetensors as a source of tensors."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.hashing import combine_digests
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.locate import weight_files
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.checkpoint.sources import GGUF_DTYPES, StoredType, check_finite, stored_types
from sparsepack.models.parts import TextPart

PLAIN = {**GGUF_DTYPES, "F64": torch.float64}
"""Types of safetensors whose numbers are weights; what those of any other mean a quantised release says."""
_TYPES = {
    **PLAIN,
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
"""The types that torch has, too."""


class SafetensorsSource:
    """One or several `.safetensors` files of a folder, with or without an index.

    decoder -- module of the base model that is its backbone, empty where the base model is that itself. Exports of such
               base models alone name their tensors by it, without what stands before it in the whole model
    part    -- which of the tensors are the model's; None: all of them
    left_out -- what the names of tensors begin with that are not read, but named in `omitted`
    renamed -- what names of tensors may begin with -> what they begin with here
    """

    file: GgufFile | None = None

    def __init__(
        self,
        folder: Path,
        decoder: str = "",
        part: TextPart | None = None,
        left_out: tuple[str, ...] = (),
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        from safetensors import SafetensorError, safe_open

        files = weight_files(folder)
        self._hash = SourceHash(files, combine_digests)
        self._file_of: dict[str, Path] = {}
        self._stored_as: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}  # as safetensors names them
        self._places: dict[Path, dict[str, tuple[int, int]]] = {}
        self.omitted: list[str] = []
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for stored_as in file.keys():  # noqa: SIM118 (not a dict)
                        if part is not None and stored_as.startswith(part.others):
                            continue
                        name = f"model.{stored_as}" if decoder and stored_as.startswith(f"{decoder}.") else stored_as
                        for begins, own in (renamed if part is None else part.names).items():
                            if name.startswith(begins):
                                name = own + name.removeprefix(begins)
                                break
                        if left_out and (matched := [of for of in (stored_as, name) if of.startswith(left_out)]):
                            self.omitted.append(matched[0])
                            continue
                        if name in self._file_of:
                            raise CheckpointError(
                                f"{path}: the tensor {name} stands in {self._file_of[name].name} too; expected one "
                                "model in the folder: move the files of the other one away"
                            )
                        self._file_of[name], self._stored_as[name] = path, stored_as
                        stored = file.get_slice(stored_as)
                        self._shapes[name] = tuple(stored.get_shape())
                        self.types[name] = stored.get_dtype()
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: PLAIN.get(kind, torch.float32) for name, kind in self.types.items()}

    @property
    def hash(self) -> SourceHash:
        return self._hash

    @property
    def nbytes(self) -> Mapping[str, int]:
        """The bytes of each tensor."""
        return {
            name: math.prod(shape) * _TYPES.get(self.types[name], torch.uint8).itemsize
            for name, shape in self._shapes.items()
        }

    @property
    def stored_types(self) -> tuple[StoredType, ...]:
        """How its tensors are stored."""
        nbytes = self.nbytes
        return stored_types((self.types[name], shape, nbytes[name], False) for name, shape in self._shapes.items())

    def path_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._file_of[name]

    def tensor(self, name: str) -> torch.Tensor:
        stored_as = self._stored_as[name]
        value = self._read(self._file_of[name], lambda file: file.get_tensor(stored_as))
        self._hash.count_read(self._file_of[name], value.nbytes)
        return check_finite(self._file_of[name], stored_as, value)

    def stored(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors as they are stored, whatever their values. A release may have thousands in a file: its header is
        read once, which `safe_open` does each time."""
        found: dict[str, torch.Tensor] = {}
        for name in names:
            path = self._file_of[name]
            try:
                if path not in self._places:
                    self._places[path] = _places(path)
                found[name] = _read_at(
                    path, self._places[path][self._stored_as[name]], _TYPES[self.types[name]], self._shapes[name]
                )
                self._hash.count_read(path, found[name].nbytes)
            except (OSError, ValueError, LookupError) as error:
                raise _unreadable(path, error) from error
        return found

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor in its stored dtype."""
        stored_as = self._stored_as[name]
        return self._read(self._file_of[name], lambda file: file.get_slice(stored_as)[first:last])

    @staticmethod
    def _read(path: Path, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return read(file)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """The first byte and the one behind the last of each tensor in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    listed = ((name, entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    return {name: (8 + length + first, 8 + length + last) for name, (first, last) in listed}


def _read_at(path: Path, place: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    value = torch.empty(shape, dtype=dtype)
    if value.nbytes != place[1] - place[0]:
        raise ValueError(f"{place[1] - place[0]} bytes of {list(shape)} numbers")
    into = value.view(-1).view(torch.uint8).numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(place[0])
        while len(into):
            count = file.readinto(into)
            if not count:
                raise ValueError("it ends within a tensor")
            into = into[count:]
    return value


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """What is said of a file that safetensors does not read: of one that may not be read it says that there is none."""
    try:
        path.open("rb").close()
    except OSError as refusal:
        denied = isinstance(refusal, PermissionError)
        remedy = (
            "give yourself the right to read it (chmod)" if denied else "look whether it is there, or copy it again"
        )
        return CheckpointError(f"{path}: cannot be read ({refusal.strerror}); {remedy}")
    return CheckpointError(f"{path}: cannot be read ({shown(error)}); is it whole?")

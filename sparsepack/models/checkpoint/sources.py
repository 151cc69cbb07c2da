"""The sources of a checkpoint's tensors: sharded safetensors, or a GGUF as made by llama.cpp's converter."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.hashing import combined
from sparsepack.files.stored import Name, Stored, checked, shown
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.gguf_names import ROTARY_FACTORS, SHARED_GATE, gguf_names, unpermute_rotary
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.family import Family
from sparsepack.models.text_parts import TextPart

_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAFETENSORS_DTYPES = {**_GGUF_DTYPES, "F64": torch.float64}


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, each read from disk when asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, without reading any."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Every tensor's stored type, without reading any."""

    @property
    def hash(self) -> SourceHash:
        """The hash of all weight bytes."""

    @property
    def file(self) -> GgufFile | None:
        """The file and its keys where it is a GGUF."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype, on the CPU.

        Raises `CheckpointError` where its file cannot be read, or a value is NaN or infinite.
        """


Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors, by their names."""


class MadeSource:
    """A source made of another one, whose tensors are others.

    entries -- all of them; tensor -- one, by its name; slices -- where they are stored apart, those of one along its
    first dimension, by its name
    """

    def __init__(
        self,
        source: TensorSource,
        entries: Entries,
        tensor: Callable[[str], torch.Tensor],
        slices: Callable[[str], Iterable[torch.Tensor]] | None = None,
    ) -> None:
        self._source, self._tensor, self._slices = source, tensor, slices
        self._shapes = {name: shape for name, (_, shape) in entries.items()}
        self._dtypes = {name: dtype for name, (dtype, _) in entries.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    @property
    def hash(self) -> SourceHash:
        """The hash of the source that it was made of."""
        return self._source.hash

    @property
    def file(self) -> GgufFile | None:
        return self._source.file

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def slices(self, name: str) -> Iterable[torch.Tensor]:
        """The slices of a tensor along its first dimension, in order; where they are stored apart one at a time is in
        memory."""
        return self.tensor(name) if self._slices is None else self._slices(name)


def entries_of(source: TensorSource) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of a source's tensors."""
    return {name: (source.dtypes[name], shape) for name, shape in source.shapes.items()}


def changed_source(
    source: TensorSource, changed: Callable[[str], torch.Tensor | None], entries: Entries | None = None
) -> MadeSource:
    """Another source with some of its tensors changed, and perhaps others added.

    changed -- a tensor that changed, by its name; None: it is as it was
    entries -- type and shape of the tensors where these changed, or that were added
    """

    def tensor(name: str) -> torch.Tensor:
        found = changed(name)
        return source.tensor(name) if found is None else found

    return MadeSource(source, entries_of(source) | dict(entries or {}), tensor)


class _Index(Stored):
    weight_map: dict[str, Name]


class SafetensorsSource:
    """One or several `.safetensors` files of a folder, with or without an index.

    decoder -- module of the base model that is its backbone, empty where the base model is that itself. Exports of such
               base models alone name their tensors by it, without what stands before it in the whole model
    part    -- which of the tensors are the model's; None: all of them
    """

    file: GgufFile | None = None

    def __init__(self, folder: Path, decoder: str = "", part: TextPart | None = None) -> None:
        from safetensors import SafetensorError, safe_open

        files = self._listed(folder)
        self._hash = SourceHash(files, combined)
        self._file_of: dict[str, Path] = {}
        self._stored_as: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for stored_as in file.keys():  # noqa: SIM118 (not a dict)
                        if part is not None and stored_as.startswith(part.others):
                            continue
                        name = f"model.{stored_as}" if decoder and stored_as.startswith(f"{decoder}.") else stored_as
                        for begins, own in part.names.items() if part is not None else ():
                            if name.startswith(begins):
                                name = own + name.removeprefix(begins)
                                break
                        if name in self._file_of:
                            raise CheckpointError(f"{path}: the tensor {name} stands in {self._file_of[name].name} too")
                        self._file_of[name], self._stored_as[name] = path, stored_as
                        stored = file.get_slice(stored_as)
                        self._shapes[name] = tuple(stored.get_shape())
                        self._dtypes[name] = _SAFETENSORS_DTYPES.get(stored.get_dtype(), torch.float32)
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

    @staticmethod
    def _listed(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = sorted(set(checked(_Index, json.loads(index.read_text(encoding="utf-8"))).weight_map.values()))
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{index}: not a shard index ({shown(error)}); download it again") from error
            for name in names:
                if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
                    raise CheckpointError(
                        f"{index}: the shard {name[:200]!r} lies outside of the folder; expected names of files in it"
                    )
            missing = [name[:200] for name in names if not _is_there(folder / name)]
            if missing:
                raise CheckpointError(f"{folder}: the shard {missing[0]} of {index.name} is missing; download it again")
            return [folder / name for name in names]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            found = "pickled weights (.bin, .pth), which are not read: save the model as safetensors first"
            pickles = [*folder.glob("*.bin"), *folder.glob("*.pth")]
            raise CheckpointError(f"{folder}: no .safetensors file{'; found ' + found if pickles else ' in it'}")
        return files

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    @property
    def hash(self) -> SourceHash:
        return self._hash

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                value: torch.Tensor = file.get_tensor(self._stored_as[name])
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return _finite(path, self._stored_as[name], value)


def _finite(path: Path, name: str, value: torch.Tensor) -> torch.Tensor:
    if not all_finite(value):
        raise CheckpointError(
            f"{path}: the tensor {name} has values that are NaN or infinite; expected the weights of a trained model: "
            "copy or export them again"
        )
    return value


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({shown(error)}); is it whole?")


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is longer than any file's
        return False


class GgufSource:
    """A GGUF in F32, F16 or BF16: names and the rotary row order are translated back to Hugging Face's."""

    def __init__(self, file: GgufFile, family: Family, layers: int, heads: int, kv_heads: int) -> None:
        self._file, self._family = file, family
        self._hash = SourceHash([file.path], "".join)  # of the file itself
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if family.gguf_permuted else {}
        self._gguf_name: dict[str, str] = {}
        known = gguf_names(family, layers)
        for name, info in file.tensors.items():
            if name in ROTARY_FACTORS:
                continue  # derived from the config; transformers computes it again
            if name not in known:
                raise CheckpointError(f"{file.path}: the tensor {name} is not understood")
            if info.type not in _GGUF_DTYPES:
                raise CheckpointError(
                    f"{file.path}: {name} is {info.type}; expected F32, F16 or BF16: convert with --outtype bf16"
                )
            self._gguf_name[known[name]] = name

    @property
    def file(self) -> GgufFile:
        return self._file

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(gguf) for name, gguf in self._gguf_name.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: _GGUF_DTYPES[self._file.tensors[gguf].type] for name, gguf in self._gguf_name.items()}

    def _shape(self, gguf_name: str) -> tuple[int, ...]:
        shape = self._file.tensors[gguf_name].shape
        return (1, *shape) if gguf_name.endswith(f"{SHARED_GATE}.weight") and len(shape) == 1 else shape

    @property
    def hash(self) -> SourceHash:
        return self._hash

    def tensor(self, name: str) -> torch.Tensor:
        gguf_name = self._gguf_name[name]
        info = self._file.tensors[gguf_name]
        data = torch.from_numpy(np.array(self._file.bytes(gguf_name)))  # copied without the interpreter's lock
        self._file.forget(gguf_name)
        value = _finite(self._file.path, gguf_name, data.view(_GGUF_DTYPES[info.type]).reshape(self._shape(gguf_name)))
        if offset := self._family.norm_offset_of(name):
            return value.float() - offset
        for projection, heads in self._heads.items():
            if f"{projection}." in name:
                return unpermute_rotary(value, heads)
        return value

"""What a source of a checkpoint's tensors is, sources made of others, and GGUFs as made by llama.cpp's converter."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.hashing import combine_digests
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.gguf_blocks import PREDICTED
from sparsepack.models.checkpoint.gguf_config import ROTARY_FACTORS, gguf_names
from sparsepack.models.checkpoint.llama_cpp_tensors import LlamaCppTensors
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.family import Family

GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of GGUFs that torch has, too; weights of any other become float32."""
_PIECE = 1 << 20
"""So many weights are compared at one time."""


@dataclass(frozen=True)
class StoredType:
    """How some tensors of a checkpoint are stored: a type or scheme, how many, their weights and bytes, and whether
    decoding them gives values of a grid."""

    name: str
    tensors: int
    weights: int
    nbytes: int
    quantised: bool

    @property
    def bits(self) -> float | None:
        """Bits of a weight, with its share of scales; None where there are no weights."""
        return 8 * self.nbytes / self.weights if self.weights else None


def stored_types(tensors: Iterable[tuple[str, tuple[int, ...], int, bool]]) -> tuple[StoredType, ...]:
    """The sums by type of tensors, each given by type, shape in weights, bytes and whether it is quantised; the type
    with the most bytes first."""
    sums: dict[tuple[str, bool], list[int]] = {}
    for name, shape, nbytes, quantised in tensors:
        one = sums.setdefault((name, quantised), [0, 0, 0])
        one[:] = [one[0] + 1, one[1] + math.prod(shape), one[2] + nbytes]
    found = [StoredType(name, one[0], one[1], one[2], quantised) for (name, quantised), one in sums.items()]
    return tuple(sorted(found, key=lambda each: -each.nbytes))


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


def check_finite(path: Path, name: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a file as it is. Raises `CheckpointError` for values that are NaN or infinite."""
    if not all_finite(value):
        raise CheckpointError(
            f"{path}: the tensor {name} has values that are NaN or infinite; expected the weights of a trained model: "
            "copy or export them again"
        )
    return value


class GgufSource:
    """A GGUF, quantised or not: names, orders and shapes are translated back to Hugging Face's.

    omitted -- tensors of blocks behind the last one, which predict further tokens
    """

    def __init__(self, file: GgufFile, family: Family, config: Any) -> None:
        self._file, self._tensors = file, LlamaCppTensors.of(family, config)
        self._hash = SourceHash(file.paths, combine_digests if file.others else "".join)  # of one file its own
        self._gguf_name: dict[str, str] = {}
        self.omitted: list[str] = []
        known = gguf_names(family, config.num_hidden_layers)
        predicted = file.metadata.get(f"{file.metadata.get('general.architecture')}.{PREDICTED}")
        for name, info in file.tensors.items():
            if name in ROTARY_FACTORS:
                continue  # derived from the config; transformers computes it again
            block = re.match(r"blk\.(\d{1,9})\.", name)
            if predicted and block and int(block[1]) >= config.num_hidden_layers:
                self.omitted.append(name)
                continue
            module, _, end = name.rpartition(".")
            of_weights = end in ("scale", "input_scale") and name not in known
            if of_weights and f"{module}.weight" in file.tensors and info.type == "F32":
                continue  # of all weights of an NVFP4 tensor, and of its inputs, which are not rounded here
            if name not in known:
                raise CheckpointError(f"{file.path}: the tensor {name} is not understood")
            if info.type not in GGUF_DTYPES and not _dequantises(info.type):
                raise CheckpointError(
                    f"{file.path}: {name} is {info.type}, which gguf-py does not dequantise; expected another type: "
                    "convert the model with --outtype bf16"
                )
            self._gguf_name[known[name]] = name

    @property
    def file(self) -> GgufFile:
        return self._file

    @property
    def stored_types(self) -> tuple[StoredType, ...]:
        """How its tensors are stored."""
        infos = [self._file.tensors[name] for name in self._gguf_name.values()]
        return stored_types((info.type, info.shape, info.nbytes, info.type not in GGUF_DTYPES) for info in infos)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = {name: self._file.tensors[gguf].shape for name, gguf in self._gguf_name.items()}
        return {name: self._tensors.shape_here(name, shape) for name, shape in stored.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        types = {name: self._file.tensors[gguf].type for name, gguf in self._gguf_name.items()}
        return {name: GGUF_DTYPES.get(kind, torch.float32) for name, kind in types.items()}

    @property
    def hash(self) -> SourceHash:
        return self._hash

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor as they are stored, float32 where they are quantised."""
        gguf_name = self._gguf_name[name]
        info = self._file.tensors[gguf_name]
        kind, shape = info.type, self._tensors.shape_here(name, info.shape)
        if len(shape) == 1 and kind not in GGUF_DTYPES:  # a block spans several of its numbers
            return torch.from_numpy(_dequantised(kind, np.array(self._file.bytes(gguf_name)))).flatten()[first:last]
        data = np.array(self._file.bytes(gguf_name).reshape(shape[0], -1)[first:last])  # without the interpreter's lock
        if kind in GGUF_DTYPES:
            return torch.from_numpy(data).view(GGUF_DTYPES[kind]).reshape(-1, *shape[1:])
        weights = torch.from_numpy(_dequantised(kind, data)).reshape(-1, *shape[1:])
        scale = f"{gguf_name.removesuffix('.weight')}.scale"
        if scale in self._file.tensors:
            whole = torch.from_numpy(np.array(self._file.bytes(scale))).view(torch.float32).flatten()
            own = whole if whole.numel() == 1 else whole[first:last]  # of all weights, or of each expert
            weights *= own.reshape(-1, *[1] * (len(shape) - 1))
        return weights

    def tensor(self, name: str) -> torch.Tensor:
        gguf_name = self._gguf_name[name]
        value = check_finite(self._file.path, gguf_name, self.rows(name, 0, self.shapes[name][0]))
        self._file.forget(gguf_name)
        info = self._file.tensors[gguf_name]
        self._hash.count_read(self._file.paths[info.part], info.nbytes)
        return self._tensors.here(name, value)


@lru_cache
def _dequantises(kind: str) -> bool:
    """Whether gguf-py knows what a type's blocks mean."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    try:
        _dequantised(kind, np.zeros((1, block_bytes), np.uint8))
    except NotImplementedError:
        return False
    return True


def _dequantised(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The weights of whole rows of blocks: uint8 [rows, bytes] -> float32 [rows, columns]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a scale that is none gives weights that are none, which is said then
        weights: np.ndarray = dequantize(blocks, GGMLQuantizationType[kind])
    return weights


class StoredSource(TensorSource, Protocol):
    """A source of files, some rows of whose tensors can be read alone."""

    @property
    def stored_types(self) -> tuple[StoredType, ...]:
        """How its tensors are stored."""

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor in its stored dtype."""


def resolve_output(source: StoredSource | MadeSource, embedding: str, head: str) -> tuple[TensorSource, bool]:
    """Decide by the tensors whether the output matrix is the embedding (tied): it is where both are equal or only one
    of them is stored, under either name. Returns the source, which has `head` only where it is a matrix of its own, and
    whether they are tied."""
    stored = entries_of(source)
    if embedding in stored and head in stored:
        if not _same_rows(source, embedding, head):
            return source, False
        return MadeSource(source, {name: stored[name] for name in stored if name != head}, source.tensor), True
    if head not in stored:
        return source, True
    entries = {embedding if name == head else name: entry for name, entry in stored.items()}
    return MadeSource(source, entries, lambda name: source.tensor(head if name == embedding else name)), True


def _same_rows(source: StoredSource | MadeSource, one: str, other: str) -> bool:
    shape = source.shapes[one]
    if shape != source.shapes[other] or len(shape) != 2:
        return False
    if isinstance(source, MadeSource):
        return torch.equal(source.tensor(one), source.tensor(other))
    step = max(_PIECE // shape[1], 1)  # matrices that differ do so in the first piece
    pieces = ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))
    return all(bool((source.rows(one, *piece) == source.rows(other, *piece)).all()) for piece in pieces)

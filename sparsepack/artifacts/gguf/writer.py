"""Write a GGUF of ours: tensor by tensor, sealed with hashes, there as a whole or not at all."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from sparsepack.artifacts.gguf.integrity import HEADER_BYTES, HEADER_HASH, NO_HASH, TENSOR_HASHES, seal
from sparsepack.artifacts.transfer import host_pieces
from sparsepack.errors import PackingError
from sparsepack.files.atomic import atomic_file
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.files.parallel import parallel_map
from sparsepack.progress import progress

KeyValue = tuple[Any, GGUFValueType, GGUFValueType | None]
"""A value, its GGUF type, and the type of its elements where it is an array."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    shape   -- in weights, slowest dimension first
    type    -- ggml's name: F32, F16, BF16, Q4_K, Q6_K
    produce -- makes its bytes, uint8 of any shape on any device, when its turn comes
    """

    name: str
    shape: tuple[int, ...]
    type: str
    produce: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, padding not counted."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return int(math.prod(self.shape) // block * block_bytes)


def string(value: str) -> KeyValue:
    """A string value."""
    return value, GGUFValueType.STRING, None


def u32(value: int) -> KeyValue:
    """An unsigned 32-bit value, as llama.cpp expects counts and sizes."""
    return value, GGUFValueType.UINT32, None


def f32(value: float) -> KeyValue:
    """A 32-bit float."""
    return value, GGUFValueType.FLOAT32, None


def write_gguf(
    path: Path,
    architecture: str,
    values: Mapping[str, KeyValue],
    tensors: Sequence[PlannedTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    overwrite: bool = False,
    at_once: int = 1,
) -> None:
    """Write `tensors` and `values` under `general.architecture = architecture`.

    at_once -- how many tensors to make, hash and write side by side, each in a thread of its own; so many are in
               memory. 1 stays in the caller's thread. The file is the same for every number.

    Raises `OutputError` where the output exists or the disk refuses it, `PackingError` naming a tensor that cannot be
    encoded, the first one if there are several.
    """
    with atomic_file(path, overwrite) as temporary, progress("packing", len(tensors)) as advance:
        _write_header(temporary, _planned(architecture, values, tensors, alignment))
        spaces = [temporary.stat().st_size, *(tensor.nbytes for tensor in tensors)]
        *starts, end = accumulate(space + -space % alignment for space in spaces)
        os.truncate(temporary, end)  # what is not written, the padding, is zeros
        placed = zip(tensors, starts, strict=True)
        hashes = parallel_map(lambda job: _write(temporary, *job), placed, at_once, advance)
        seal(temporary, starts[0], hashes)


def _write_header(path: Path, writer: GGUFWriter) -> None:
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _planned(
    architecture: str, values: Mapping[str, KeyValue], tensors: Sequence[PlannedTensor], alignment: int
) -> GGUFWriter:
    writer = GGUFWriter(None, architecture)
    # gguf-py writes pairs in the order of this dict; the seal needs its own first.
    of_architecture = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    writer.add_string(HEADER_HASH, NO_HASH)
    writer.add_uint64(HEADER_BYTES, 0)
    placeholders = [NO_HASH] * len(tensors)
    writer.add_key_value(TENSOR_HASHES, placeholders, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.kv_data[0].update(of_architecture)
    if alignment != DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(alignment)
    for key, (value, kind, element) in values.items():
        writer.add_key_value(key, value, kind, element)
    for tensor in tensors:
        # With a dtype other than uint8, gguf-py takes the shape as weights.
        kind = GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    return writer


def _write(path: Path, tensor: PlannedTensor, start: int) -> str:
    """Write a tensor's bytes where they belong; returns their SHA-256."""
    digest = hashlib.sha256()
    data = _bytes(tensor)
    with path.open("r+b") as file:
        file.seek(start)
        for piece in host_pieces(data):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _bytes(tensor: PlannedTensor) -> torch.Tensor:
    try:
        data = tensor.produce()
    except PackingError as error:
        raise PackingError(f"{tensor.name}: {error}") from error
    if data.nbytes != tensor.nbytes:
        raise RuntimeError(f"{tensor.name}: {data.nbytes} bytes were made, {tensor.nbytes} planned")
    return data

"""Write a GGUF of ours: streamed tensor by tensor, sealed with hashes, there as a whole or not at all."""

import errno
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from sparsepack.errors import PackingError
from sparsepack.files.atomic import atomic_file
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.formats.integrity import HEADER_BYTES, HEADER_HASH, NO_HASH, TENSOR_HASHES, seal
from sparsepack.progress import progress

KeyValue = tuple[Any, GGUFValueType, GGUFValueType | None]
"""A value, its GGUF type, and the type of its elements where it is an array."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    shape   -- in weights, slowest dimension first
    type    -- ggml's name: F32, F16, BF16, Q4_K, Q6_K
    produce -- makes its bytes, uint8 of any shape, when its turn comes
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
) -> None:
    """Write `tensors` and `values` under `general.architecture = architecture`; one tensor in memory at a time.

    Raises `OutputError` where the output exists or the disk refuses it, `PackingError` naming a tensor that cannot be
    encoded.
    """
    with atomic_file(path, overwrite) as temporary, progress("packing", len(tensors)) as advance:
        writer = _planned(architecture, values, tensors, alignment)
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            header_bytes = temporary.stat().st_size
            hashes = []
            for tensor in tensors:
                data = _bytes(tensor)
                hashes.append(hashlib.sha256(data).hexdigest())
                _write(writer, data)
                del data
                advance()
        finally:
            writer.close()
        seal(temporary, header_bytes + -header_bytes % alignment, hashes)


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


def _bytes(tensor: PlannedTensor) -> Any:
    """A planned tensor's bytes as a numpy array."""
    try:
        data = tensor.produce().cpu().contiguous().view(-1).numpy()
    except PackingError as error:
        raise PackingError(f"{tensor.name}: {error}") from error
    if data.nbytes != tensor.nbytes:
        raise RuntimeError(f"{tensor.name}: {data.nbytes} bytes were made, {tensor.nbytes} planned")
    return data


def _write(writer: GGUFWriter, data: Any) -> None:
    try:
        writer.write_tensor_data(data)
    except OSError as error:
        # numpy reports a short write without an error number; a full disk is what it means.
        raise error if error.errno else OSError(errno.ENOSPC, str(error)) from error

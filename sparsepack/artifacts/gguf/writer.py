"""Write a GGUF of ours: tensor by tensor, sealed with hashes, there as a whole or not at all."""

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import WriterState

from sparsepack.artifacts.gguf.integrity import HEADER_BYTES, HEADER_HASH, TENSOR_HASHES, seal
from sparsepack.artifacts.gguf.values import KeyValue
from sparsepack.artifacts.plan import Plan, PlannedTensor
from sparsepack.artifacts.transfer import host_pieces
from sparsepack.files.atomic import atomic_file
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.files.hashing import NO_HASH
from sparsepack.files.parallel import parallel_map
from sparsepack.progress import progress


@dataclass(frozen=True, kw_only=True)
class GgufPlan(Plan):
    """A GGUF to write.

    architecture -- `general.architecture`
    values       -- the other key/value pairs, the manifest among them
    """

    architecture: str
    values: Mapping[str, KeyValue] = field(default_factory=dict)
    alignment: int = DEFAULT_ALIGNMENT

    @property
    def total_bytes(self) -> int:
        return self._places[-1]

    def write(self, path: Path, overwrite: bool = False) -> None:
        with atomic_file(path, overwrite) as temporary, progress("packing", len(self.tensors)) as advance:
            temporary.write_bytes(self._header)
            *starts, end = self._places
            os.truncate(temporary, end)  # what is not written, the padding, is zeros
            placed = zip(self.tensors, starts, strict=True)
            hashes = parallel_map(lambda job: _write(temporary, *job), placed, self.at_once, advance)
            seal(temporary, starts[0], hashes)

    @cached_property
    def _places(self) -> list[int]:
        """Where each tensor begins, and where the file ends."""
        sizes = [len(self._header), *(tensor.nbytes for tensor in self.tensors)]
        return list(accumulate(size + -size % self.alignment for size in sizes))

    @cached_property
    def _header(self) -> bytes:
        """The header, with `NO_HASH` where hashes will be."""
        writer = GGUFWriter(None, self.architecture)
        # gguf-py writes pairs in the order of this dict; the seal needs its own first.
        of_architecture = dict(writer.kv_data[0])
        writer.kv_data[0].clear()
        writer.add_string(HEADER_HASH, NO_HASH)
        writer.add_uint64(HEADER_BYTES, 0)
        no_hashes = [NO_HASH] * len(self.tensors)
        writer.add_key_value(TENSOR_HASHES, no_hashes, GGUFValueType.ARRAY, GGUFValueType.STRING)
        writer.kv_data[0].update(of_architecture)
        if self.alignment != DEFAULT_ALIGNMENT:
            writer.add_custom_alignment(self.alignment)
        for key, (value, kind, element) in self.values.items():
            writer.add_key_value(key, value, kind, element)
        for tensor in self.tensors:
            # With a dtype other than uint8, gguf-py takes the shape as weights.
            stored = GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=stored)
        header = io.BytesIO()
        writer.fout, writer.state = [header], WriterState.EMPTY  # as if it had opened a file
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return header.getvalue()


def _write(path: Path, tensor: PlannedTensor, start: int) -> str:
    """Write a tensor's bytes where they belong; returns their SHA-256."""
    digest = hashlib.sha256()
    data = tensor.data()
    with path.open("r+b") as file:
        file.seek(start)
        for piece in host_pieces(data):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()

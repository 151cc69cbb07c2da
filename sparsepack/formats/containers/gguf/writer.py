"""Write a GGUF of ours: tensor by tensor, sealed with hashes, there as a whole or not at all."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import WriterState

from sparsepack.files.atomic import atomic_file
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.files.hashing import NO_HASH, sha256_bytes
from sparsepack.formats.containers.gguf.container import HEADER_BYTES, HEADER_HASH, TENSOR_HASHES, seal
from sparsepack.formats.containers.gguf.values import KeyValue
from sparsepack.formats.containers.write_tensors import TensorFile, first_ones_output, ignored, offsets, write_files
from sparsepack.formats.plan import Plan
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.progress import progress
from sparsepack.workers.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True)
class GgufPlan(Plan):
    """A GGUF to write.

    source       -- of the model's weights, whose hash is in the manifest, or `TO_COME` in its place
    architecture -- `general.architecture`
    values       -- the other key/value pairs, the manifest among them
    """

    source: SourceHash
    architecture: str
    values: Mapping[str, KeyValue] = field(default_factory=dict)
    alignment: int = DEFAULT_ALIGNMENT

    @property
    def total_bytes(self) -> int:
        return offsets(len(self._header), self.tensors, self.alignment)[-1]

    @property
    def identity(self) -> str:
        return sha256_bytes(self._header)

    def write(self, path: Path, overwrite: bool = False, workers: Workers = ALONE) -> None:
        if not workers.first:
            write_files([self._file(first_ones_output(None, workers))], self.at_once, ignored, workers)
            return
        with atomic_file(path, overwrite) as temporary, self.source.meanwhile() as source_sha256:
            with progress("packing", -(-len(self.groups) // workers.count)) as advance:
                file = self._file(first_ones_output(temporary, workers))
                hashes = write_files([file], self.at_once, advance, workers)
            # The weights may not be others by now than those that were hashed.
            in_order = [hashes[tensor.name] for tensor in self.tensors]
            finish = partial(seal, temporary, self._header.ljust(file.offsets[0], b"\0"), in_order, source_sha256())
            finish()
            self.check(temporary, path)
            if self.measure is not None:
                finish(score=self.measure(temporary))

    def _file(self, path: Path) -> TensorFile:
        return TensorFile(path, self._header, self.groups, self.alignment)

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

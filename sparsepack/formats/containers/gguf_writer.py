"""Write a GGUF of ours, sealed with hashes, as a whole or not at all; choose the types of embedding and output."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import WriterState

from sparsepack.errors import PackingError
from sparsepack.files.atomic import atomic_file
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.files.hashing import NO_HASH, sha256_bytes
from sparsepack.formats.blocks.table import BLOCKS, type_that_fits
from sparsepack.formats.containers.gguf import HEADER_BYTES, HEADER_HASH, TENSOR_HASHES, KeyValue, seal
from sparsepack.formats.containers.write_tensors import write_planned
from sparsepack.formats.matrix import fitting_type, relative_error
from sparsepack.formats.plan import Plan, TensorFile, WriteFiles, naming, offsets
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.family import HEAD

LARGEST_ERROR = 0.03
"""A type may cause an error of this share of the weights. Weights that are normally distributed lose 0.017 in Q6_K and
0.005 in Q8_0."""
SAMPLED_ROWS = 1024
"""The error is measured on this many rows."""

_SMALLEST_FIRST = ("Q6_K", "Q8_0", "F16")


def embedding_types(
    checkpoint: Checkpoint, embedding: str, output: str, auto: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """GGUF name -> ggml's type of the embedding and, where it is a matrix of its own, the output; and notes.

    embedding, output -- what the user asked for
    auto -- what "auto" stands for where it fits the width, else what llama-quantize takes; None: the smallest of Q6_K,
            Q8_0 and F16 that fits the width and whose error on rows of the matrix is at most `LARGEST_ERROR`

    Raises `PackingError` where one tied matrix is asked to have two types, a type does not fit, or weights are not
    finite.
    """
    if checkpoint.tied:
        if embedding != output and "auto" not in (embedding, output):
            raise PackingError(
                f"{checkpoint.name}: output type {output} and embedding type {embedding}, but the output matrix is the "
                "embedding itself (tied): one tensor has one type; give the same type twice, or one of the two"
            )
        asked = {"token_embd.weight": output if embedding == "auto" else embedding}
    else:
        asked = {"token_embd.weight": embedding, "output.weight": output}
    width = checkpoint.config.hidden_size
    chosen: dict[str, tuple[str, str | None]] = {}
    for name, kind in asked.items():
        if kind != "auto":
            chosen[name] = fitting_type(kind, width, name), None
        elif auto is not None:
            chosen[name] = fallen_back(auto, width, name)
        else:
            chosen[name] = _measured(checkpoint, name, width)
    return {name: kind for name, (kind, _) in chosen.items()}, [note for _, note in chosen.values() if note]


def _measured(checkpoint: Checkpoint, name: str, width: int) -> tuple[str, str | None]:
    """The smallest type that loses little of a matrix, and a note where it is not the smallest of all."""
    weights = checkpoint.tensor(HEAD if name == "output.weight" else checkpoint.family.embedding)
    sample = weights[:: -(-len(weights) // SAMPLED_ROWS)]
    reasons = []
    for type in _SMALLEST_FIRST[:-1]:
        if width % (block := BLOCKS[type].weights):
            reasons.append(f"{type} needs a multiple of {block} columns, it has {width}")
            continue
        with naming(name):
            error = relative_error(sample, type)
        if error <= LARGEST_ERROR:
            break
        reasons.append(f"{type} would lose {error:.1%} of it")
    else:
        type = _SMALLEST_FIRST[-1]
    return type, f"{name} is {type}: {', '.join(reasons)}" if reasons else None


def fallen_back(type: str, columns: int, name: str) -> tuple[str, str | None]:
    """The type in which llama-quantize stores a matrix that should be of `type`, and a note where it is another."""
    found = type_that_fits(type, columns)
    if found == type:
        return type, None
    return found, f"{name} is {found}: {columns} columns, {type} needs a multiple of {BLOCKS[type].weights}"


@dataclass(frozen=True, kw_only=True)
class GgufPlan(Plan):
    """A GGUF to write.

    source       -- of the model's weights, whose hash is in the manifest, or `PENDING_HASH` in its place
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

    def files(self, path: Path) -> list[TensorFile]:
        return [TensorFile(path, self._header, self.groups, self.alignment)]

    def write(self, path: Path, overwrite: bool = False, write_files: WriteFiles | None = None) -> None:
        with atomic_file(path, overwrite) as temporary, self.source.meanwhile() as source_sha256:
            (file,) = self.files(temporary)
            hashes = (write_files or write_planned)([file], self.at_once)
            # The weights may not be others by now than those that were hashed.
            in_order = [hashes[tensor.name] for tensor in self.tensors]
            finish = partial(seal, temporary, self._header.ljust(file.offsets[0], b"\0"), in_order, source_sha256())
            finish()
            self.check(temporary, path)
            if self.measure is not None:
                finish(score=self.measure(temporary))

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
            stored = GGMLQuantizationType(BLOCKS[tensor.type].gguf)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=stored)
        header = io.BytesIO()
        writer.fout, writer.state = [header], WriterState.EMPTY  # as if it had opened a file
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return header.getvalue()

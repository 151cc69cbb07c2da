"""The plain GGUF: what stock llama.cpp loads and runs, vocabulary included.

Tensor names, their shapes and the order of q and k rows are llama.cpp's. Beside its keys stand `sparsepack.*` strings
(hashes, manifest, the model's config.json), which it ignores.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.artifacts.gguf.embeddings import embedding_types
from sparsepack.artifacts.gguf.writer import KeyValue, PlannedTensor, string, write_gguf
from sparsepack.artifacts.gguf.zigzag_layout import CONFIG
from sparsepack.artifacts.llama_cpp.keys import architecture_keys, rotary_factors
from sparsepack.artifacts.llama_cpp.pretokenizers import INEXACT
from sparsepack.artifacts.llama_cpp.vocabulary import VALUE_TYPES, vocabulary
from sparsepack.artifacts.manifest import make_manifest, manifest_values
from sparsepack.artifacts.transfer import stacked_on, tensors_at_once
from sparsepack.codecs.matrices import encode_rows
from sparsepack.codecs.superblock import BLOCK
from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.atomic import check_output
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint import HEAD, Checkpoint
from sparsepack.models.gguf_names import gguf_names, permute_rotary
from sparsepack.models.source_files import config_json, tokenizer_config

PLAIN_TYPES = ("q4_k", "f16", "bf16", "f32")

_WITHOUT_BIAS = ("qwen3",)


def write_plain(
    checkpoint: Checkpoint,
    path: Path,
    *,
    type: str = "q4_k",
    provenance: Mapping[str, Any] | None = None,
    output_type: str = "auto",
    embedding_type: str = "auto",
    device: str = "cpu",
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Pack a model into a GGUF for stock llama.cpp; returns the notes that the user should see.

    type           -- of the matrices: q4_k, f16, bf16 or f32; norms and biases are F32
    output_type    -- of the output matrix: "auto" (Q6_K in a q4_k file, else `type`), q6_k, q4_k, f16, bf16, f32
    embedding_type -- of the embedding, likewise; a tied model has this one matrix for both
    provenance     -- recipe and the like for the manifest: see `make_manifest`
    device         -- where the encoders run

    Holds one matrix in memory; a CUDA device holds four, and the host 32 MiB of each. Raises `PackingError` naming what
    llama.cpp cannot express or a tensor that the type does not fit, and `OutputError` where the output exists or cannot
    be written.
    """
    path = Path(path)
    check_output(path, overwrite)
    if type not in PLAIN_TYPES:
        raise PackingError(f"unknown type {type!r} of a plain GGUF; expected one of {', '.join(PLAIN_TYPES)}")
    try:
        architecture = checkpoint.architecture
    except CheckpointError as error:
        raise PackingError(str(error)) from error
    if type == "q4_k":
        _check_widths(checkpoint)
    try:
        keys, notes = architecture_keys(architecture, checkpoint.config)
    except PackingError as error:
        raise PackingError(f"{checkpoint.name}: {error}") from error
    values = keys | _vocabulary_values(checkpoint, notes)
    embedding, more = embedding_types(checkpoint, embedding_type, output_type, "q6_k" if type == "q4_k" else type)
    notes += more
    tensors = list(_plan(checkpoint, architecture, type.upper(), embedding, device))
    shapes = {t.name: {"shape": list(t.shape), "padding_rows": 0} for t in tensors if len(t.shape) == 2}
    manifest = make_manifest(type, checkpoint, provenance or {}, shapes, notes)
    values |= manifest_values(manifest) | {CONFIG: string(config_json(checkpoint))}
    at_once = tensors_at_once(device)
    write_gguf(path, checkpoint.family.gguf, values, tensors, overwrite=overwrite, at_once=at_once)
    return tuple(notes)


def _vocabulary_values(checkpoint: Checkpoint, notes: list[str]) -> dict[str, KeyValue]:
    """The tokenizer's keys; notes where llama.cpp's only resembles it."""
    tokenizer = json.loads(checkpoint.tokenizer_json())
    keys = vocabulary(tokenizer, tokenizer_config(checkpoint), checkpoint.config.to_dict())
    name = keys["tokenizer.ggml.pre"]
    if name in INEXACT:
        notes.append(f"pre-tokenizer {name}: {INEXACT[name]}")
    return {key: (value, *VALUE_TYPES[key]) for key, value in keys.items()}


def _plan(
    checkpoint: Checkpoint, architecture: Architecture, type: str, embedding: Mapping[str, str], device: str
) -> Iterator[PlannedTensor]:
    shapes = checkpoint.source.shapes
    factors = rotary_factors(architecture, checkpoint.config)
    if factors is not None:
        yield PlannedTensor("rope_freqs.weight", tuple(factors.shape), "F32", partial(encode_rows, factors, "F32"))
    for name, source in gguf_names(checkpoint.layers).items():
        if source not in shapes or (source == HEAD and checkpoint.tied):
            continue
        shape = shapes[source]
        if name.endswith(".bias") and checkpoint.family.gguf in _WITHOUT_BIAS:
            raise PackingError(
                f"{name}: llama.cpp knows no biases in {checkpoint.family.gguf} models; "
                "pack as zigzag-q4_k, which sparsepack itself runs"
            )
        kind = embedding.get(name, type if len(shape) == 2 else "F32")
        yield PlannedTensor(name, shape, kind, partial(_encoded, checkpoint, source, kind, device))


def _check_widths(checkpoint: Checkpoint) -> None:
    for name, source in gguf_names(checkpoint.layers).items():
        shape = checkpoint.source.shapes.get(source, ())
        if name.startswith("blk.") and len(shape) == 2 and shape[-1] % BLOCK:
            raise PackingError(
                f"{name}: {shape[-1]} columns, Q4_K needs a multiple of {BLOCK}; "
                "pack as zigzag-q4_k, which pads rows instead, or as f16"
            )


def _encoded(checkpoint: Checkpoint, source: str, kind: str, device: str) -> Tensor:
    return encode_rows(llama_cpp_rows(checkpoint, source, stacked_on(device, [checkpoint.tensor(source)])), kind)


def llama_cpp_rows(checkpoint: Checkpoint, source: str, value: torch.Tensor) -> torch.Tensor:
    """A Hugging Face tensor with its rows in llama.cpp's order: q and k of llama models have rotary pairs adjacent."""
    config = checkpoint.config
    for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if checkpoint.family.gguf_permuted and f".{projection}." in source:
            return permute_rotary(value, heads)
    return value

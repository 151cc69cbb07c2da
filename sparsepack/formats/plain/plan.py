"""The plain GGUF: what stock llama.cpp loads and runs, vocabulary included.

Tensor names, their shapes and the order of q and k rows are llama.cpp's. Beside its keys stand `sparsepack.*` strings
(hashes, manifest, the model's config.json and tokenizer.json), which it ignores.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.codecs import gptq
from sparsepack.formats.codecs.matrices import decode_rows, encode_rows
from sparsepack.formats.codecs.types import BLOCKS
from sparsepack.formats.containers.gguf.embeddings import embedding_types, fallen_back
from sparsepack.formats.containers.gguf.values import KeyValue, manifest_values, string
from sparsepack.formats.containers.gguf.writer import GgufPlan
from sparsepack.formats.encoded import EncodedSite, SiteEncoder
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.plain.artifact import PlainArtifact, is_shared_gate, llama_cpp_rows
from sparsepack.formats.plain.llama_cpp.keys import architecture_keys, rotary_factors
from sparsepack.formats.plain.llama_cpp.pretokenizers import INEXACT
from sparsepack.formats.plain.llama_cpp.vocabulary import KEY_TYPES, vocabulary
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, PlanRequest, alone, manifest_shapes, naming, tensors_of
from sparsepack.formats.table import Format
from sparsepack.models.checkpoint.checkpoint import HEAD, Checkpoint
from sparsepack.models.checkpoint.experts import part_shapes, part_tensor
from sparsepack.models.checkpoint.gguf_config import OWN_CONFIG, UNQUANTISED, gguf_names
from sparsepack.models.checkpoint.source_files import config_json, tokenizer_config
from sparsepack.models.tokenizer.chat import SPECIAL_TOKENS
from sparsepack.models.tokenizer.gguf_tokenizer import OWN_TOKENIZER
from sparsepack.reconstruction import Inputs


def opened(file: GgufFile, manifest: Mapping[str, Any]) -> Artifact:
    """A plain GGUF of ours that has been opened."""
    return PlainArtifact(manifest, file)


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model that no engine can run, `PackingError` naming what llama.cpp cannot express
    of it or of its vocabulary."""
    _architecture_values(checkpoint)
    _vocabulary_values(checkpoint)
    if not checkpoint.family.gguf_biases:
        for name, source in gguf_names(checkpoint.family, checkpoint.layers).items():
            if name.endswith(".bias") and source in checkpoint.source.shapes:
                raise PackingError(
                    f"{name}: llama.cpp knows no biases in {checkpoint.family.gguf} models; "
                    "pack as zigzag-q4_k, which sparsepack itself runs"
                )


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> GgufPlan:
    """A model as a GGUF for stock llama.cpp: matrices in `format.matrices`, norms and biases in F32.

    An output or embedding of type "auto" is Q6_K in a file of superblocks, else as the matrices are. What a type's
    blocks do not fit is stored as llama-quantize would, with a note. Writing it holds one matrix in memory; a CUDA
    device holds four, and the host 32 MiB of each. Raises `PackingError` naming a tensor that the type asked for it
    does not fit.
    """
    type = format.matrices
    keys, notes = _architecture_values(checkpoint)
    vocabulary_keys, more = _vocabulary_values(checkpoint)
    values, notes = keys | vocabulary_keys, notes + more
    auto = type if BLOCKS[type][0] == 1 else "Q6_K"
    embedding, more = embedding_types(checkpoint, request.embedding_type, request.output_type, auto)
    notes += more
    types = embedding | _types(checkpoint, type, notes)
    groups = tuple(_groups(checkpoint, types, request))
    shapes = manifest_shapes(tensors_of(groups))
    manifest = make_manifest(format.name, checkpoint, request.provenance, shapes, notes, checkpoint.source.hash.so_far)
    own = {
        OWN_CONFIG: string(config_json(checkpoint)),
        OWN_TOKENIZER: string(checkpoint.tokenizer_json()),
        SPECIAL_TOKENS: string(json.dumps(checkpoint.special_tokens)),
    }
    return GgufPlan(
        format=format.name,
        groups=groups,
        notes=tuple(notes),
        at_once=tensors_at_once(request.device),
        source=checkpoint.source.hash,
        architecture=checkpoint.family.gguf,
        values=values | _named(manifest_values(manifest), vocabulary_keys) | own,
    )


_PHI_3 = re.compile("phi-?3", re.IGNORECASE)
_PHI_3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}


def _named(values: dict[str, KeyValue], vocabulary_keys: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
    """The keys with a name by which llama.cpp does not take another model's vocabulary for Phi-3's: it asks the name
    alone, and loads no such file without these tokens."""
    tokens = vocabulary_keys["tokenizer.ggml.tokens"][0]
    if _PHI_3_TOKENS.issubset(tokens):
        return values
    return values | {"general.name": string(_PHI_3.sub("Phi 3", values["general.name"][0]))}


def _architecture_values(checkpoint: Checkpoint) -> tuple[dict[str, KeyValue], list[str]]:
    """The model's keys, and notes where llama.cpp computes something else."""
    architecture = checkpoint.architecture
    with naming(checkpoint.name):
        return architecture_keys(architecture, checkpoint.config)


def _vocabulary_values(checkpoint: Checkpoint) -> tuple[dict[str, KeyValue], list[str]]:
    """The tokenizer's keys, and notes where llama.cpp's only resembles it."""
    keys = _vocabulary(
        checkpoint.tokenizer_json(),
        json.dumps(tokenizer_config(checkpoint), default=str),
        json.dumps(checkpoint.config.to_dict(), default=str),
        json.dumps([*checkpoint.turn_ends, *checkpoint.architecture.eos]),
    )
    name = keys["tokenizer.ggml.pre"]
    notes = [f"pre-tokenizer {name}: {INEXACT[name]}"] if name in INEXACT else []
    return {key: (value, *KEY_TYPES[key]) for key, value in keys.items()}, notes


@lru_cache(maxsize=1)
def _vocabulary(*parsed: str) -> dict[str, Any]:
    """`vocabulary` of JSON texts: several formats ask for that of one model, and a large one takes half a second."""
    return vocabulary(*map(json.loads, parsed))


def _groups(checkpoint: Checkpoint, types: Mapping[str, str], request: PlanRequest) -> Iterator[PlannedGroup]:
    shapes = _shapes(checkpoint)
    for name, factors in rotary_factors(checkpoint.architecture, checkpoint.config).items():
        stored = partial(encode_rows, factors, "F32")
        yield alone(PlannedTensor(name, tuple(factors.shape), "F32", weights=False), stored)
    for name, source in gguf_names(checkpoint.family, checkpoint.layers).items():
        if source not in shapes or (source == HEAD and checkpoint.tied):
            continue
        shape = shapes[source]
        kind = types.get(name, "F32")
        encoded = partial(_encoded, checkpoint, source, kind, request.device)
        yield alone(PlannedTensor(name, shape, kind), request.encoded.get(name, encoded))


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`); what fell back to another type than Q4_K is rounded alone."""
    types = _types(checkpoint, format.matrices, [])
    names = {source: name for name, source in gguf_names(checkpoint.family, checkpoint.layers).items()}

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        tensors, rows, start = {}, {}, 0
        sources = [f"{checkpoint.family.block(layer)}.{part}.weight" for part in checkpoint.family.projections[site]]
        kind = types[names[sources[0]]]  # of all of them: it follows from the number of columns
        if inputs is None or kind != "Q4_K":
            blocks = encode_rows(weight, kind)
        else:
            blocks = gptq.q4_k_rows(weight, inputs)
        for source in sources:
            rows[names[source]] = slice(start, start + checkpoint.source.shapes[source][0])
            tensors[names[source]] = llama_cpp_rows(checkpoint, source, blocks[rows[names[source]]])
            start = rows[names[source]].stop
        return EncodedSite(tensors, decode_rows(blocks, kind), rows)

    return encode


def _types(checkpoint: Checkpoint, type: str, notes: list[str]) -> dict[str, str]:
    """The type of each matrix of the blocks; notes where it is not the one of the format."""
    kinds, said, shapes = {}, {}, _shapes(checkpoint)
    for name, source in gguf_names(checkpoint.family, checkpoint.layers).items():
        shape = shapes.get(source, ())
        part = name.split(".", 2)[-1]
        if name.startswith("blk.") and len(shape) > 1 and part not in UNQUANTISED:
            kinds[name], said[part] = fallen_back(type, shape[-1], f"blk.*.{part}")
    notes += [note for note in said.values() if note]
    return kinds


def _encoded(checkpoint: Checkpoint, source: str, kind: str, device: str) -> Tensor:
    value = part_tensor(checkpoint.family, source, checkpoint.tensor)
    if value.dim() < 3:
        return encode_rows(llama_cpp_rows(checkpoint, source, stacked_on(device, [value])), kind)
    return torch.stack([encode_rows(stacked_on(device, [matrix]), kind) for matrix in value])  # an expert at a time


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The tensors as llama.cpp has them, by the names that `gguf_names` gives: those of experts in parts."""
    shapes = {**checkpoint.source.shapes, **part_shapes(checkpoint.family, checkpoint.source.shapes)}
    vectors = {name: shape[1:] for name, shape in shapes.items() if is_shared_gate(checkpoint.family, name)}
    return shapes | vectors

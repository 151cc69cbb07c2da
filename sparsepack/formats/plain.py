"""The plain GGUF: what stock llama.cpp loads and runs, vocabulary included.

Tensor names, shapes and the order of rows and columns are llama.cpp's. Beside its keys stand `sparsepack.*` strings
(hashes, manifest, the model's config.json and tokenizer.json), which it ignores.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats import gptq
from sparsepack.formats.artifact import Artifact, Program
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.gguf import GgufArtifact, KeyValue, manifest_values, string
from sparsepack.formats.containers.gguf_writer import GgufPlan, embedding_types, fallen_back
from sparsepack.formats.llama_cpp.keys import architecture_keys, llama_cpp, rotary_factors
from sparsepack.formats.llama_cpp.vocabulary import INEXACT, KEY_TYPES, vocabulary
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.plan import (
    EncodedSite,
    PlannedGroup,
    PlannedTensor,
    PlanRequest,
    SiteEncoder,
    alone,
    manifest_shapes,
    naming,
    tensors_of,
)
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import Format, those_with
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import checked_family
from sparsepack.models.checkpoint.experts import part_shapes
from sparsepack.models.checkpoint.gguf_config import (
    OWN_CONFIG,
    ROTARY_FACTORS,
    UNQUANTISED,
    gguf_config,
    gguf_names,
)
from sparsepack.models.checkpoint.llama_cpp_parts import shapes_there, tensor_here, tensor_there
from sparsepack.models.checkpoint.llama_cpp_tensors import LlamaCppTensors
from sparsepack.models.checkpoint.writer import config_json, tokenizer_config
from sparsepack.models.families import FAMILIES, family_of
from sparsepack.models.family import HEAD
from sparsepack.models.tokenizer.chat import SPECIAL_TOKENS
from sparsepack.models.tokenizer.gguf_tokenizer import OWN_TOKENIZER
from sparsepack.models.tokenizer.tokenizer import gguf_tokenizer
from sparsepack.reconstruction import Inputs


@dataclass(frozen=True)
class PlainArtifact(GgufArtifact):
    """A plain GGUF of ours."""

    def packed(self) -> PackedModel:
        raise ArtifactError(
            f"{self.path}: a plain {self.format.name.upper()} GGUF, expected a zigzag one: run it with llama.cpp, "
            f"or pack the model again as {those_with('runs')}"
        )

    def stock(self) -> StockModel:
        config = gguf_config(self.file, str(self.path))
        family_of(config.model_type, str(self.path))
        family = checked_family(config, str(self.path))
        names = {theirs: ours for ours, theirs in gguf_names(family, config.num_hidden_layers).items()}
        tensors = LlamaCppTensors.of(family, config)

        def part(name: str) -> Tensor:
            """One tensor by its Hugging Face name."""
            if name == HEAD and names[name] not in self.tensors:
                name = family.embedding
            if names.get(name) not in self.tensors:
                raise ArtifactError(f"{self.path}: the tensor {name} is missing; pack the model again")
            return tensors.here(name, self.decoded(names[name]))

        def tensor(name: str) -> Tensor:
            return tensor_here(family, config, name, part)

        return StockModel(config, tensor, gguf_tokenizer(self.file, str(self.path)))

    def holds_weights(self, name: str) -> bool:
        return name not in ROTARY_FACTORS

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        source = gguf_names(checkpoint.family, checkpoint.layers).get(name, "")
        if source != HEAD and source not in _shapes(checkpoint):
            return None
        value = tensor_there(checkpoint.family, checkpoint.config, source, checkpoint.tensor)
        return LlamaCppTensors.of(checkpoint.family, checkpoint.config).there(source, value)

    def programs(self) -> Iterator[Program]:
        yield Program("llama.cpp", True, "runs it, dense")
        yield Program("gguf-py, GGUF viewers", True, "show and dequantise each tensor")
        lost = self._lost_in_transformers()
        what = f"leaves out {lost}: the model would be another" if lost else "dequantises it on loading (gguf_file=)"
        yield Program("transformers", not lost, what)
        yield Program("sparsepack", True, "reads it as a source model; evaluates, inspects and verifies it")

    def _lost_in_transformers(self) -> str | None:
        """Which of the model's numbers transformers (5.23) does not take from a GGUF."""
        metadata = self.file.metadata
        kind = metadata.get("general.architecture")
        if f"{kind}.rope.scaling.type" in metadata or not self.tensors.keys().isdisjoint(ROTARY_FACTORS):
            return "the rotary scaling"
        if kind == "llama" and f"{kind}.expert_count" in metadata:
            return "the experts"
        if any(name.endswith("attn_output.bias") for name in self.tensors):
            return "the biases"
        all_known = (family.gguf for family in FAMILIES.values())
        known = [gguf for gguf in all_known if gguf is not None and gguf.architecture == kind]
        if not any(gguf.transformers for gguf in known):
            return "everything"
        heads = {gguf.head for gguf in known if gguf.head}
        if heads and metadata.get(f"{kind}.attention.key_length") not in heads:
            return "the head size"
        return None


def opened(file: GgufFile, manifest: Mapping[str, Any]) -> Artifact:
    """A plain GGUF of ours that has been opened."""
    return PlainArtifact(manifest, file)


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model that no engine can run, `PackingError` naming what llama.cpp cannot express
    of it or of its vocabulary."""
    _architecture_values(checkpoint)
    _vocabulary_values(checkpoint)
    gguf = checkpoint.family.gguf
    if gguf is not None and gguf.biases is not None:
        for name, source in gguf_names(checkpoint.family, checkpoint.layers).items():
            known = name.split(".")[-2] in gguf.biases or name.split(".", 2)[-1] in gguf.tensors
            if name.endswith(".bias") and not known and source in checkpoint.source.shapes:
                raise PackingError(
                    f"{name}: llama.cpp knows no biases in {gguf.architecture} models; "
                    "pack as zigzag-q4_k, which sparsepack itself runs"
                )


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> GgufPlan:
    """A model as a GGUF for stock llama.cpp: matrices in `format.matrices`, norms and biases in F32.

    An output or embedding of type "auto" is Q6_K in a file of superblocks, else as the matrices are. What a type's
    blocks do not fit is stored as llama-quantize would, with a note. Writing it holds one matrix in memory; a CUDA
    device holds four, and the host 32 MiB of each. Raises `PackingError` naming a tensor that the type asked for it
    does not fit.
    """
    type = format.matrices.block
    keys, notes = _architecture_values(checkpoint)
    vocabulary_keys, more = _vocabulary_values(checkpoint)
    values, notes = keys | vocabulary_keys, notes + more
    auto = "Q6_K" if type == "Q4_K" else type
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
        architecture=llama_cpp(checkpoint.family).name(checkpoint.architecture.experts is not None),
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
        stored = partial(BLOCKS["F32"].encode, factors)
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
    types = _types(checkpoint, format.matrices.block, [])
    layout = LlamaCppTensors.of(checkpoint.family, checkpoint.config)
    names = {source: name for name, source in gguf_names(checkpoint.family, checkpoint.layers).items()}
    shapes = _shapes(checkpoint)

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        tensors, rows, start = {}, {}, 0
        family = checkpoint.architecture.family(layer)
        whole = [f"{family.block(layer)}.{part}.weight" for part in family.projections[site]]
        sources = [part for name in whole for part in part_shapes(family, {name: shapes[name]}) or (name,)]
        kind = types[names[sources[0]]]  # of all of them: it follows from the number of columns
        columns = layout.columns(sources[0])
        if columns is not None:
            weight, inputs = weight[:, columns], None if inputs is None else inputs.permuted(columns)
        if inputs is None or kind != "Q4_K":
            blocks = BLOCKS[kind].encode(weight)
        else:
            blocks = gptq.q4_k_rows(weight, inputs)
        for source in sources:
            rows[names[source]] = slice(start, start + shapes[source][0])
            stored = blocks[rows[names[source]]]
            order = layout.rows(source, len(stored))
            tensors[names[source]] = stored if order is None else stored[order]
            start = rows[names[source]].stop
        decoded = BLOCKS[kind].decode(blocks)
        return EncodedSite(tensors, decoded if columns is None else decoded[:, columns.argsort()], rows)

    return encode


def _types(checkpoint: Checkpoint, type: str, notes: list[str]) -> dict[str, str]:
    """The type of each matrix of the blocks; notes where it is not the one of the format."""
    kinds, said, shapes = {}, {}, _shapes(checkpoint)
    for name, source in gguf_names(checkpoint.family, checkpoint.layers).items():
        shape = shapes.get(source, ())
        part = name.split(".", 2)[-1]
        if part.endswith(".weight") and name.startswith("blk.") and len(shape) > 1 and part not in UNQUANTISED:
            kinds[name], said[part] = fallen_back(type, shape[-1], f"blk.*.{part}")
    notes += [note for note in said.values() if note]
    return kinds


def _encoded(checkpoint: Checkpoint, source: str, kind: str, device: str) -> Tensor:
    value = tensor_there(checkpoint.family, checkpoint.config, source, checkpoint.tensor)
    layout = LlamaCppTensors.of(checkpoint.family, checkpoint.config)
    if len(layout.shape_there(source, tuple(value.shape))) < 3:
        return BLOCKS[kind].encode(layout.there(source, stacked_on(device, [value])))
    return torch.stack([BLOCKS[kind].encode(stacked_on(device, [matrix])) for matrix in value])  # an expert at a time


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The tensors as llama.cpp has them, by the names that `gguf_names` gives: those of experts in parts."""
    shapes = shapes_there(checkpoint.family, checkpoint.config, checkpoint.source.shapes)
    layout = LlamaCppTensors.of(checkpoint.family, checkpoint.config)
    return {name: layout.shape_there(name, shape) for name, shape in shapes.items()}

"""How large an artifact will be: its tensors from shapes alone, its header from the strings that go into it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from sparsepack.artifacts.gguf.embeddings import embedding_types
from sparsepack.artifacts.gguf.integrity import NO_HASH
from sparsepack.artifacts.gguf.writer import KeyValue, string
from sparsepack.artifacts.gguf.zigzag import ALIGNMENT
from sparsepack.artifacts.gguf.zigzag_layout import CONFIG, NUMBERS, TOKENIZER, site_shapes
from sparsepack.artifacts.llama_cpp.keys import architecture_keys, rotary_factors
from sparsepack.artifacts.llama_cpp.vocabulary import VALUE_TYPES, vocabulary
from sparsepack.artifacts.manifest import make_manifest, manifest_values
from sparsepack.codecs import zigzag
from sparsepack.codecs.matrices import ZIGZAG
from sparsepack.files.gguf import DEFAULT_ALIGNMENT
from sparsepack.models.checkpoint import FINAL_NORM, HEAD, Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.gguf_names import gguf_names
from sparsepack.models.rule import SiteKey, SiteRule
from sparsepack.models.source_files import config_json, tokenizer_config
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stages.pack import Pack, provenance
from sparsepack.recipe.stages.thresholds import ActivationSparsity, sparse
from sparsepack.sparsity.allocation import sparse_sites
from sparsepack.sparsity.thresholds import Thresholds

_SIZES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}
_TYPICAL = 0.12345678901234567  # a threshold as long as most, for the manifest's table


@dataclass(frozen=True)
class PlannedMatrix:
    """A tensor that will be written: stored and logical shape, ggml's type."""

    name: str
    shape: tuple[int, ...]
    logical: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file, padding after it not counted."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return int(math.prod(self.shape) // block * block_bytes)


@dataclass(frozen=True)
class Prediction:
    """An artifact before it is made."""

    tensors: tuple[PlannedMatrix, ...]
    file_bytes: int
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file, over the model's weights (a policy holds none), as `artifacts.inspect.describe` has it."""
        weights = sum(math.prod(t.logical) for t in self.tensors if not t.name.endswith((".threshold", ".offset")))
        return 8 * self.file_bytes / weights


def predict(recipe: Recipe, checkpoint: Checkpoint) -> Prediction:
    """The artifact that the recipe's pack section makes. Raises `PackingError` for types that do not fit."""
    asked = Pack.of(recipe)
    assert asked is not None
    if asked.format == ZIGZAG:
        return _zigzag(recipe, asked, checkpoint)
    return _plain(recipe, asked, checkpoint)


def _zigzag(recipe: Recipe, asked: Pack, checkpoint: Checkpoint) -> Prediction:
    architecture = checkpoint.architecture
    embedding, notes = embedding_types(checkpoint, asked.embedding_type, asked.output_type)
    big = (architecture.vocabulary, architecture.hidden)
    tensors = [PlannedMatrix(name, big, big, kind) for name, kind in embedding.items()]
    tensors.append(_vector("output_norm.weight", checkpoint.source.shapes[FINAL_NORM][0]))
    skipping: set[SiteKey] = set()
    activation = ActivationSparsity.of(recipe)
    if activation is not None and sparse(recipe):
        skipping = set(sparse_sites(checkpoint, activation.include, activation.ignore))
    for layer in range(checkpoint.layers):
        for name, module in checkpoint.family.norms.items():
            width = checkpoint.source.shapes[f"model.layers.{layer}.{module}.weight"][0]
            tensors.append(_vector(f"blk.{layer}.{name}.weight", width))
        for site, (parts, columns) in site_shapes(architecture).items():
            rule = activation if (layer, site) in skipping else None
            tensors += _site(checkpoint, layer, site, sum(parts), columns, rule)
    values = {CONFIG: string(config_json(checkpoint)), TOKENIZER: string(checkpoint.tokenizer_json())}
    values[NUMBERS] = string(json.dumps(architecture.to_json()))
    return _predicted(recipe, checkpoint, ZIGZAG, tensors, values, notes, ALIGNMENT)


def _site(
    checkpoint: Checkpoint, layer: int, site: str, rows: int, columns: int, activation: ActivationSparsity | None
) -> Iterator[PlannedMatrix]:
    name, projections = f"blk.{layer}.{site}", checkpoint.family.projections[site]
    stored = (zigzag.bands(rows), columns, zigzag.BAND_ROWS)
    yield PlannedMatrix(f"{name}.weight", stored, (rows, columns), "Q4_K")
    if any(f"model.layers.{layer}.{projection}.bias" in checkpoint.source.shapes for projection in projections):
        yield _vector(f"{name}.bias", rows)
    if activation is not None:
        per_channel = activation.allocation == "global" or activation.criterion != "magnitude"
        yield _vector(f"{name}.threshold", columns if per_channel else 1)
        if activation.offsets:
            yield _vector(f"{name}.offset", columns)


def _plain(recipe: Recipe, asked: Pack, checkpoint: Checkpoint) -> Prediction:
    kind = asked.format
    architecture = checkpoint.architecture
    values, notes = architecture_keys(architecture, checkpoint.config)
    tokenizer = json.loads(checkpoint.tokenizer_json())
    words = vocabulary(tokenizer, tokenizer_config(checkpoint), checkpoint.config.to_dict())
    values |= {key: (value, *VALUE_TYPES[key]) for key, value in words.items()}
    values[CONFIG] = string(config_json(checkpoint))
    types = (asked.embedding_type, asked.output_type)
    embedding, more = embedding_types(checkpoint, *types, "q6_k" if kind == "q4_k" else kind)
    tensors = []
    factors = rotary_factors(architecture, checkpoint.config)
    if factors is not None:
        tensors.append(_vector("rope_freqs.weight", len(factors)))
    for name, source in gguf_names(checkpoint.layers).items():
        shape = checkpoint.source.shapes.get(source)
        if shape is not None and not (source == HEAD and checkpoint.tied):
            stored = embedding.get(name, kind.upper() if len(shape) == 2 else "F32")
            tensors.append(PlannedMatrix(name, shape, shape, stored))
    return _predicted(recipe, checkpoint, kind, tensors, values, notes + more, DEFAULT_ALIGNMENT)


def _predicted(
    recipe: Recipe,
    checkpoint: Checkpoint,
    kind: str,
    tensors: list[PlannedMatrix],
    values: Mapping[str, KeyValue],
    notes: list[str],
    alignment: int,
) -> Prediction:
    shapes = {t.name: {"shape": list(t.logical), "padding_rows": 0} for t in tensors if len(t.logical) == 2}
    table = _placeholder(recipe, checkpoint) if sparse(recipe) else None
    made_from: dict[str, Any] = {"recipe": provenance(recipe)}
    if table is not None:
        made_from |= {"thresholds": table.summary(), "calibration": {"sha256": NO_HASH}}
    manifest = make_manifest(kind, checkpoint, made_from, shapes, notes)
    header = 24 + 200 + sum(_pair_bytes(key, value) for key, value in {**values, **manifest_values(manifest)}.items())
    # Per tensor its info, and its hash in the list.
    header += sum(8 + len(t.name) + 4 + 8 * len(t.shape) + 12 + 8 + len(NO_HASH) for t in tensors)
    total = sum(size + -size % alignment for size in (header, *(t.nbytes for t in tensors)))
    return Prediction(tuple(tensors), total, tuple(notes))


def _placeholder(recipe: Recipe, checkpoint: Checkpoint) -> Thresholds:
    """A table of the length that the real one will have."""
    asked = ActivationSparsity.of(recipe)
    assert asked is not None
    vector = torch.zeros(1) if asked.allocation == "global" or asked.criterion != "magnitude" else None
    rule = SiteRule(_TYPICAL, channel_weights=vector, sparsity=asked.sparsity, realised=_TYPICAL)
    rules = {(layer, site): rule for layer in range(checkpoint.layers) for site in SITES}
    where = (checkpoint.sha256, NO_HASH, asked.allocation, asked.criterion)
    return Thresholds(*where, asked.sparsity, asked.upstream, rules)


def _vector(name: str, width: int) -> PlannedMatrix:
    return PlannedMatrix(name, (width,), (width,), "F32")


def _pair_bytes(key: str, value: KeyValue) -> int:
    return 8 + len(key) + 4 + _value_bytes(value[0], value[1], value[2])


def _value_bytes(value: Any, kind: GGUFValueType, element: GGUFValueType | None) -> int:
    if kind == GGUFValueType.STRING:
        return 8 + len(value if isinstance(value, bytes) else value.encode())
    if kind == GGUFValueType.ARRAY:
        assert element is not None
        return 12 + sum(_value_bytes(item, element, None) for item in value)
    return _SIZES.get(kind, 4)

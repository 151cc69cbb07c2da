"""The slid folder: a pruned model with its nonzero weights alone, in windows as 2:4 tensor cores take them.

Of each pruned Linear, in place of its `weight` [rows, columns] (`formats.orders.slide`):

    NAME.weight             [rows, stored]                 I8, F8_E4M3 or BF16: the sparse24 values
    NAME.weight_positions   [rows, stored / 4 rounded up]  U8: the positions in their windows, two bits each
    NAME.weight_scale       [rows]                         F32: of an output channel; absent for BF16

Everything else is the checkpoint's, in its own type. `stored` never is `columns`, so that a program which does not know
the format stops at the shape of `weight`. Nothing here depends on a GPU: what its library wants is made when the model
is loaded. config.json says in `quantization_config.patterns` which Linear has which pattern, `[keep, of]`, and with
`quantization_config.attention` true that the manifest has sparse attention: a copy by transformers leaves that behind.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.stored import shown
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats import gptq
from sparsepack.formats.artifact import Artifact, Program
from sparsepack.formats.containers.safetensors import CONFIG, ArtifactFolder, FolderArtifact
from sparsepack.formats.containers.safetensors_writer import FolderPlan, model_texts
from sparsepack.formats.manifest import PRUNING, make_manifest
from sparsepack.formats.orders import slide as slid_matrix
from sparsepack.formats.orders.slide import (
    VALUE_TYPES,
    Slide,
    ValueType,
    dequantised,
    quantise_rows,
    unpack_positions,
    unslide,
)
from sparsepack.formats.plan import (
    EncodedSite,
    PlannedGroup,
    PlannedTensor,
    PlanRequest,
    SiteEncoder,
    alone,
    manifest_shapes,
    tensors_of,
)
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import check_taken, family_of
from sparsepack.models.pattern import Pattern
from sparsepack.reconstruction import Inputs

POSITIONS, SCALE = "_positions", "_scale"
"""The name of a weight's positions and of its scales ends with these, after the name of the weight."""


def value_type(format: Format) -> ValueType:
    """The type of the values in a format of slid folders."""
    return VALUE_TYPES[format.matrices.block]


def slid_formats() -> dict[str, ValueType]:
    """The value type of each format that leaves out pruned weights, by the format's name."""
    return {name: value_type(format) for name, format in FORMATS.items() if format.weight_sparsity}


def configured_type(format: Any) -> ValueType:
    """The type of the values by `format` of a folder's `quantization_config`. Raises `ArtifactError` where unknown."""
    known = slid_formats()
    if not isinstance(format, str) or format not in known:
        raise ArtifactError(f"format {str(format)[:60]!r}: expected one of {', '.join(known)}; update sparsepack")
    return known[format]


def configured_slides(patterns: Any) -> dict[str, Slide]:
    """How each Linear was slid, by `patterns` of a folder's `quantization_config`, the name of each -> [keep, of].

    Raises `ArtifactError` for patterns that mean nothing.
    """
    try:
        return {name: Slide(Pattern(keep, of)) for name, (keep, of) in patterns.items()}
    except (TypeError, ValueError, AttributeError, PackingError) as error:
        raise ArtifactError(f"quantization_config.patterns: not understood ({error}); pack the model again") from error


def slid_tensors(weight: str, rows: int, stored: int, values: ValueType) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of a sparse24 matrix in the order in which they are stored: name -> shape and type.

    weight -- the matrix's name; stored -- values that are stored for a row
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        weight: ((rows, stored), values.stored),
        weight + POSITIONS: ((rows, -(-stored // 4)), "U8"),
    }
    if values.scaled:
        tensors[weight + SCALE] = ((rows,), "F32")
    return tensors


@dataclass(frozen=True)
class Sparse24Artifact(FolderArtifact):
    """A slid folder. Its weights are known by the names that they have in the checkpoint."""

    @cached_property
    def slides(self) -> dict[str, Slide]:
        """How each pruned matrix was slid, by its name without `.weight`."""
        try:
            patterns = json.loads(self.folder.texts[CONFIG])["quantization_config"]["patterns"]
            return {name: Slide(Pattern(*map(_number, numbers))) for name, numbers in patterns.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PackingError) as error:
            raise ArtifactError(f"{self.path}: its patterns are not understood ({shown(error)})") from error

    def slide_of(self, name: str) -> Slide | None:
        """How a weight was slid; None for a tensor that is as in the checkpoint."""
        return self.slides.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def pruning(self) -> dict[str, Any]:
        patterns = Counter(str(how.pattern) for how in self.slides.values())
        return {"patterns": dict(patterns), **(self.manifest.get(PRUNING) or {})}

    def holds_weights(self, name: str) -> bool:
        return not name.endswith((".weight" + POSITIONS, ".weight" + SCALE))

    def type_of_weights(self, name: str) -> str:
        return value_type(self.format).name if self.slide_of(name) else super().type_of_weights(name)

    def check_bytes(self) -> None:
        super().check_bytes()
        for name, how in self.slides.items():
            self._positions(f"{name}.weight", how, 0, None)

    def check_shapes(self) -> None:
        values = value_type(self.format)
        self._check_sites()
        for name, how in self.slides.items():
            weight = f"{name}.weight"
            shape = self.logical_shape(weight) if weight in self.tensors else ()
            if len(shape) != 2:
                raise ArtifactError(f"{self.path}: {weight} is missing or no matrix; pack it again")
            rows, columns = shape
            expected = slid_tensors(weight, rows, how.stored(columns), values)
            for part, (of_shape, of_type) in expected.items():
                info = self.tensors.get(part)
                if info is None or info.shape != of_shape or info.type != of_type:
                    found = "missing" if info is None else f"{info.type} {list(info.shape)}"
                    raise ArtifactError(f"{self.path}: {part} is {found}, expected {of_type} {list(of_shape)}")
        for name, info in self.tensors.items():
            if self.slide_of(name) is None and self.logical_shape(name) != info.shape:
                raise ArtifactError(f"{self.path}: {name} has not the shape in the manifest; pack it again")

    def _check_sites(self) -> None:
        """The projections of a site share their input, which is quantised for all of them or for none."""
        family = family_of(self.manifest["model"]["model_type"], str(self.path))
        for site in family.projections:
            ways = [kind.projections[site] for kind in family.kinds]
            for prefix in {name[: -len(of)] for name in self.slides for way in ways for of in way if name.endswith(of)}:
                missing = [[of for of in way if prefix + of not in self.slides] for way in ways]
                if all(missing):
                    lacks = min(missing, key=len)[0]
                    raise ArtifactError(f"{self.path}: {prefix}{lacks} is not slid as its site is; pack it again")

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        how = self.slide_of(name)
        if how is None:
            return super().decoded(name, first, last)
        of_type = value_type(self.format)
        values = self.stored(name, first, last).view(of_type.dtype).float()  # [rows, stored]
        weight = unslide(values, self._positions(name, how, first, last), how, self.logical_shape(name)[1])
        if not of_type.scaled:
            return weight
        return dequantised(weight, self.stored(name + SCALE, first, last).view(torch.float32).flatten())

    def _positions(self, name: str, how: Slide, first: int, last: int | None) -> Tensor:
        try:
            return unpack_positions(self.stored(name + POSITIONS, first, last), self.tensors[name].shape[1], how)
        except PackingError as error:
            raise ArtifactError(f"{self.path}: {name}: {error}; copy or pack it again") from error

    def stock(self) -> StockModel:
        stock, values = super().stock(), value_type(self.format)
        if not values.scaled:
            return stock
        slid = {
            (layer, site)
            for layer in range(stock.layers)
            for site, names in stock.family.at(stock.config, layer).projections.items()
            if f"model.layers.{layer}.{names[0]}" in self.slides
        }
        return replace(stock, inputs=dict.fromkeys(slid, values.dtype))

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "evaluates it")
        yield Program("transformers", True, "from_pretrained, after `import sparsepack`")
        yield Program("llama.cpp", False, "it takes GGUF files; pack as q4_k for it")


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:60]!r} is no number")
    return value


SLID_AT_ONCE = 16
"""This many matrices are slid side by side for a CUDA device: hashing and writing take many times as long as sliding,
and a matrix takes little more memory there than its weights."""

_OWN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model of a family that no format holds."""
    check_taken("pack", checkpoint.family, checkpoint.name)


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    """A pruned model as a slid folder. Writing it holds one matrix in memory; a CUDA device holds `SLID_AT_ONCE`, and
    the host 32 MiB of each.

    Raises `PackingError` where nothing is pruned, or windows cannot hold a pattern; writing raises it naming a matrix
    that does not have its pattern, and its first wrong group.
    """
    patterns = _patterns(checkpoint, request)
    slides = {name: Slide(pattern) for name, pattern in patterns.items()}
    groups = tuple(_groups(format, checkpoint, slides, request))
    left = sorted(name for name in _matrices(checkpoint) if name not in slides)
    notes = [f"{len(left)} matrices are not pruned and stay as they are: {left[0]} the first"] if left else []
    notes += request.notes
    said: dict[str, Any] = {"patterns": {name: [pattern.keep, pattern.of] for name, pattern in patterns.items()}}
    if request.attention is not None:
        said["attention"] = True
    return FolderPlan(
        format=format.name,
        groups=groups,
        notes=tuple(notes),
        at_once=tensors_at_once(request.device, SLID_AT_ONCE),
        source=checkpoint.source.hash,
        manifest=partial(
            make_manifest,
            format.name,
            checkpoint,
            request.provenance,
            manifest_shapes(tensors_of(groups)),
            notes,
            attention=request.attention,
        ),
        texts=model_texts(checkpoint, format.name, **said),
    )


def _patterns(checkpoint: Checkpoint, request: PlanRequest) -> Mapping[str, Pattern]:
    if request.pattern is not None:
        return dict.fromkeys(_matrices(checkpoint), request.pattern)
    if not request.patterns:
        raise PackingError(
            f"{checkpoint.name}: nothing says which of its weights were pruned; prune it (in a recipe, add a prune "
            "section), or give --keep and --of for a model that was pruned elsewhere"
        )
    return request.patterns


def _matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of all matrices of the blocks, without `.weight`."""
    return [
        f"model.layers.{layer}.{name}"
        for layer in range(checkpoint.layers)
        for names in checkpoint.family_at(layer).projections.values()
        for name in names
    ]


def _groups(
    format: Format, checkpoint: Checkpoint, slides: Mapping[str, Slide], request: PlanRequest
) -> Iterator[PlannedGroup]:
    """What stays as it is, then the sparse24 matrices: embedding and output take a thread longest, so they begin
    first."""
    source, values = checkpoint.source, value_type(format)
    slid = {f"{name}.weight": how for name, how in slides.items()}

    def own(name: str) -> Tensor:
        return _bytes(checkpoint.tensor(name))

    def made(name: str) -> Sequence[Tensor]:
        if name in request.encoded:
            return [give() for part, give in request.encoded.items() if part.startswith(name)]
        weight = stacked_on(request.device, [checkpoint.tensor(name)])
        parts = slid_matrix.encode(weight, slid[name], values.dtype, values.steps)
        return [_bytes(part) for part in parts if part is not None]

    for name, shape in source.shapes.items():
        if name not in slid:
            yield alone(PlannedTensor(name, shape, _OWN_TYPES[source.dtypes[name]]), partial(own, name))
    for name, how in slid.items():
        rows, columns = source.shapes[name]
        parts = tuple(
            PlannedTensor(part, shape, type, (rows, columns) if part == name else None, weights=part == name)
            for part, (shape, type) in slid_tensors(name, rows, how.stored(columns), values).items()
        )
        yield PlannedGroup(parts, partial(made, name))


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`). A matrix that is not pruned stays as it is."""
    values = value_type(format)
    assert values.steps is not None
    steps = values.steps
    slides = {name: Slide(pattern) for name, pattern in _patterns(checkpoint, request).items()}

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        tensors: dict[str, Tensor] = {}
        rows, start, decoded = {}, 0, weight.clone()
        for projection in checkpoint.family_at(layer).projections[site]:
            name = f"{checkpoint.family.block(layer)}.{projection}"
            part = slice(start, start + checkpoint.source.shapes[f"{name}.weight"][0])
            start = part.stop
            if name not in slides:
                continue
            if inputs is None:
                q, scale = quantise_rows(weight[part], values.dtype, steps)
            else:
                q, scale = gptq.symmetric_rows(weight[part], inputs, values.dtype, steps)
            decoded[part] = dequantised(q, scale)
            stored = slid_matrix.encode(q.float(), slides[name], values.dtype, scale=scale)
            names = slid_tensors(f"{name}.weight", 0, 0, values)
            tensors |= {of: _bytes(made) for of, made in zip(names, stored, strict=True) if made is not None}
            rows[f"{name}.weight"] = part
        return EncodedSite(tensors, decoded, rows)

    return encode


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    """A slid folder that has been opened. Raises `ArtifactError` where it does not hold together."""
    artifact = Sparse24Artifact(manifest, folder)
    artifact.check_shapes()
    return artifact

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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats import gptq
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.containers.safetensors import ArtifactFolder
from sparsepack.formats.containers.safetensors_writer import FolderPlan
from sparsepack.formats.linear_folder import (
    SCALE,
    LinearFolderArtifact,
    Stored,
    as_bytes,
    block_linears,
    folder_plan,
    own_tensors,
)
from sparsepack.formats.manifest import PRUNING
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
)
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.pattern import Pattern
from sparsepack.reconstruction import Inputs

POSITIONS = "_positions"
"""The name of a weight's positions ends so, after the name of the weight."""


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
        return {name: Slide(Pattern(*map(_number, numbers))) for name, numbers in patterns.items()}
    except (TypeError, ValueError, AttributeError, PackingError) as error:
        raise ArtifactError(f"quantization_config.patterns: not understood ({error}); pack the model again") from error


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:60]!r} is no number")
    return value


def linears_of(section: Mapping[str, Any]) -> dict[str, Slide]:
    """How each Linear was slid, by a folder's `quantization_config` (`linear_folder.configured_linears`)."""
    return configured_slides(section.get("patterns"))


def slid_tensors(weight: str, rows: int, stored: int, values: ValueType) -> Stored:
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
class Sparse24Artifact(LinearFolderArtifact):
    """A slid folder."""

    behind: ClassVar[tuple[str, ...]] = (POSITIONS, SCALE)

    @property
    def slides(self) -> dict[str, Slide]:
        """How each pruned matrix was slid, by its name without `.weight`."""
        return self.linears

    def stored_tensors(self, name: str) -> Stored:
        rows, columns = self.logical_shape(f"{name}.weight")
        return slid_tensors(f"{name}.weight", rows, self.slides[name].stored(columns), value_type(self.format))

    def pruning(self) -> dict[str, Any]:
        patterns = Counter(str(how.pattern) for how in self.slides.values())
        return {"patterns": dict(patterns), **(self.manifest.get(PRUNING) or {})}

    def type_of_weights(self, name: str) -> str:
        return value_type(self.format).name if self.how_stored(name) else super().type_of_weights(name)

    def check_bytes(self) -> None:
        super().check_bytes()
        for name, how in self.slides.items():
            self._positions(f"{name}.weight", how, 0, None)

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        how = self.how_stored(name)
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


SLID_AT_ONCE = 16
"""This many matrices are slid side by side for a CUDA device: hashing and writing take many times as long as sliding,
and a matrix takes little more memory there than its weights."""


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
    section = {"patterns": {name: [pattern.keep, pattern.of] for name, pattern in patterns.items()}}
    at_once = tensors_at_once(request.device, SLID_AT_ONCE)
    return folder_plan(format, checkpoint, request, groups, section, notes, at_once)


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
    return [name for names in block_linears(checkpoint).values() for name in names]


def _groups(
    format: Format, checkpoint: Checkpoint, slides: Mapping[str, Slide], request: PlanRequest
) -> Iterator[PlannedGroup]:
    """What stays as it is, then the sparse24 matrices: embedding and output take a thread longest, so they begin
    first."""
    source, values = checkpoint.source, value_type(format)
    slid = {f"{name}.weight": how for name, how in slides.items()}

    def made(name: str) -> Sequence[Tensor]:
        if name in request.encoded:
            return [give() for part, give in request.encoded.items() if part.startswith(name)]
        weight = stacked_on(request.device, [checkpoint.tensor(name)])
        parts = slid_matrix.encode(weight, slid[name], values.dtype, values.steps)
        return [as_bytes(part) for part in parts if part is not None]

    yield from own_tensors(checkpoint, slides)
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
            tensors |= {of: as_bytes(made) for of, made in zip(names, stored, strict=True) if made is not None}
            rows[f"{name}.weight"] = part
        return EncodedSite(tensors, decoded, rows)

    return encode


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    """A slid folder that has been opened. Raises `ArtifactError` where it does not hold together."""
    artifact = Sparse24Artifact(manifest, folder)
    artifact.check_shapes()
    return artifact

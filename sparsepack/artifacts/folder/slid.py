"""The slid folder: a pruned model with its nonzero weights alone, in windows as 2:4 tensor cores take them.

Of each pruned Linear, in place of its `weight` [rows, columns] (`codecs.slide`):

    NAME.weight             [rows, stored]                 I8, F8_E4M3 or BF16: the slid values
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

from sparsepack.artifacts.artifact import Artifact, Program
from sparsepack.artifacts.folder.container import ArtifactFolder, FolderArtifact
from sparsepack.artifacts.folder.layout import CONFIG
from sparsepack.artifacts.folder.writer import FolderPlan, model_texts
from sparsepack.artifacts.formats import Format
from sparsepack.artifacts.manifest import PRUNING, make_manifest
from sparsepack.artifacts.plan import PlannedGroup, PlannedTensor, PlanRequest, alone, tensors_of
from sparsepack.artifacts.stock import StockModel
from sparsepack.artifacts.transfer import stacked_on, tensors_at_once
from sparsepack.codecs import slid_matrix
from sparsepack.codecs.pattern import Pattern
from sparsepack.codecs.slide import Slide, unpack_positions, unslide
from sparsepack.codecs.symmetric import STEPS, dequantised
from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import family_of

POSITIONS, SCALE = "_positions", "_scale"
"""After the name of a weight."""

VALUES: Mapping[str, torch.dtype] = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16}
"""By the format's type."""

SLID_AT_ONCE = 16
"""Matrices side by side for a CUDA device: hashing and writing take many times as long as sliding, and a matrix there
little more memory than its weights."""

_OWN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    """A pruned model as a slid folder. Writing it holds one matrix in memory; a CUDA device holds `SLID_AT_ONCE`, and
    the host 32 MiB of each.

    Raises `PackingError` where nothing is pruned, or windows cannot hold a pattern; writing raises it naming a matrix
    that does not have its pattern, and its first wrong group.
    """
    patterns = _patterns(checkpoint, request)
    slides = {name: Slide(pattern) for name, pattern in patterns.items()}
    groups = tuple(_groups(format, checkpoint, slides, request.device))
    shapes = checkpoint.source.shapes
    listed = {
        tensor.name: {"shape": list(shapes.get(tensor.name, tensor.shape)), "padding_rows": 0}
        for tensor in tensors_of(groups)
        if len(tensor.shape) == 2
    }
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
            listed,
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
            f"{checkpoint.name}: nothing says which of its weights were pruned; run `sparsepack prune`, or give --keep "
            "and --of for a model that was pruned elsewhere"
        )
    return request.patterns


def _matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of all matrices of the blocks, without `.weight`."""
    names = [name for of_site in checkpoint.family.projections.values() for name in of_site]
    return [f"model.layers.{layer}.{name}" for layer in range(checkpoint.layers) for name in names]


def _groups(format: Format, checkpoint: Checkpoint, slides: Mapping[str, Slide], device: str) -> Iterator[PlannedGroup]:
    """What stays as it is, then the slid matrices: embedding and output take a thread longest, so they begin first."""
    source, kind = checkpoint.source, format.matrices
    slid = {f"{name}.weight": how for name, how in slides.items()}

    def own(name: str) -> Tensor:
        return _bytes(checkpoint.tensor(name))

    def made(name: str) -> Sequence[Tensor]:
        weight = stacked_on(device, [checkpoint.tensor(name)])
        parts = slid_matrix.encode(weight, slid[name], VALUES[kind])
        return [_bytes(part) for part in parts if part is not None]

    for name, shape in source.shapes.items():
        if name not in slid:
            yield alone(PlannedTensor(name, shape, _OWN_TYPES[source.dtypes[name]]), partial(own, name))
    for name, how in slid.items():
        rows, columns = source.shapes[name]
        stored = how.stored(columns)
        parts = [
            PlannedTensor(name, (rows, stored), kind, logical=(rows, columns)),
            PlannedTensor(name + POSITIONS, (rows, -(-stored // 4)), "U8", weights=False),
        ]
        if kind != "BF16":
            parts.append(PlannedTensor(name + SCALE, (rows,), "F32", weights=False))
        yield PlannedGroup(tuple(parts), partial(made, name))


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    """A slid folder that has been opened. Raises `ArtifactError` where it does not hold together."""
    artifact = SlidArtifact(manifest, folder)
    artifact.check_shapes()
    return artifact


@dataclass(frozen=True)
class SlidArtifact(FolderArtifact):
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

    def check_bytes(self) -> None:
        super().check_bytes()
        for name, how in self.slides.items():
            self._positions(f"{name}.weight", how, 0, None)

    def check_shapes(self) -> None:
        kind = self.format.matrices
        self._check_sites()
        for name, how in self.slides.items():
            weight = f"{name}.weight"
            shape = self.logical_shape(weight) if weight in self.tensors else ()
            if len(shape) != 2:
                raise ArtifactError(f"{self.path}: {weight} is missing or no matrix; pack it again")
            rows, columns = shape
            stored = how.stored(columns)
            expected: dict[str, tuple[tuple[int, ...], str]] = {weight: ((rows, stored), kind)}
            expected[weight + POSITIONS] = ((rows, -(-stored // 4)), "U8")
            if kind != "BF16":
                expected[weight + SCALE] = ((rows,), "F32")
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
        for names in family.projections.values():
            for prefix in {name[: -len(of)] for name in self.slides for of in names if name.endswith(of)}:
                if missing := [of for of in names if prefix + of not in self.slides]:
                    raise ArtifactError(f"{self.path}: {prefix}{missing[0]} is not slid as its site is; pack it again")

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        how = self.slide_of(name)
        if how is None:
            return super().decoded(name, first, last)
        values, scale = self._values(name, first, last), self._part(name + SCALE, first, last)
        weight = unslide(values, self._positions(name, how, first, last), how, self.logical_shape(name)[1])
        return weight if scale is None else dequantised(weight, scale.view(torch.float32).flatten())

    def _values(self, name: str, first: int, last: int | None) -> Tensor:
        """float32 [rows, stored]"""
        data = self._part(name, first, last)
        assert data is not None
        return data.view(VALUES[self.format.matrices]).float()

    def _positions(self, name: str, how: Slide, first: int, last: int | None) -> Tensor:
        packed = self._part(name + POSITIONS, first, last)
        assert packed is not None
        try:
            return unpack_positions(packed, self.tensors[name].shape[1], how)
        except PackingError as error:
            raise ArtifactError(f"{self.path}: {name}: {error}; copy or pack it again") from error

    def _part(self, name: str, first: int, last: int | None) -> Tensor | None:
        """The bytes of some rows of a tensor: uint8 [rows, bytes per row]; None where there is no such tensor."""
        if name not in self.tensors:
            return None
        data = self.folder.bytes(name).reshape(self.tensors[name].shape[0], -1)
        return torch.from_numpy(data[first:last].copy())

    def stock(self) -> StockModel:
        stock, dtype = super().stock(), VALUES[self.format.matrices]
        if dtype not in STEPS:
            return stock
        sites = stock.family.projections.items()
        slid = {
            (layer, site)
            for layer in range(stock.layers)
            for site, names in sites
            if f"model.layers.{layer}.{names[0]}" in self.slides
        }
        return replace(stock, inputs=dict.fromkeys(slid, dtype))

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "evaluates it")
        yield Program("transformers", True, "from_pretrained, after `import sparsepack`")
        yield Program("llama.cpp", False, "it takes GGUF files; pack as q4_k for it")


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:60]!r} is no number")
    return value

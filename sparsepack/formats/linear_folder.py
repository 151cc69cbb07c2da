"""Folders in which Linears of a model are stored in a way of ours, and all else as the checkpoint has it.

In place of a Linear's `weight` such a folder has `NAME.weight`, of another shape, and tensors whose names go on behind
that. config.json says in `quantization_config` which Linears these are and how each is stored. transformers and vLLM
read it by `configured_linears`, `pack` writes it by `folder_plan`.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.stored import shown
from sparsepack.formats.artifact import Program
from sparsepack.formats.containers.safetensors import CONFIG, ArtifactFolder, FolderArtifact
from sparsepack.formats.containers.safetensors_writer import FolderPlan, model_texts
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, PlanRequest, alone, manifest_shapes, tensors_of
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import family_of

SCALE = "_scale"
"""The name of the scales of a weight's rows ends so, after the name of the weight."""

Stored = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensors in the order in which they are stored: name -> shape and type."""


def configured_format(name: Any) -> Format:
    """The format of a folder by `format` of its `quantization_config`. Raises `ArtifactError` where it is unknown."""
    known = [row.name for row in FORMATS.values() if row.folder]
    if not isinstance(name, str) or name not in known:
        raise ArtifactError(f"format {str(name)[:60]!r}: expected one of {', '.join(known)}; update sparsepack")
    return FORMATS[name]


def configured_linears(section: Mapping[str, Any]) -> dict[str, Any]:
    """How each Linear is stored, by its name, from a folder's `quantization_config`.

    Raises `ArtifactError` for a format that is unknown, and for what this version does not understand.
    """
    format = configured_format(section.get("format"))
    found: dict[str, Any] = import_module(format.module).linears_of(section)
    return found


def open_linears(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> "LinearFolderArtifact":
    """The artifact in an opened folder. Raises `ArtifactError` where it does not hold together, or has no Linears in a
    format of ours."""
    format = FORMATS[manifest["kind"]]
    if not format.folder:
        raise ArtifactError(f"{folder.path}: its manifest says {format.name}, which is no folder; pack it again")
    found: LinearFolderArtifact = import_module(format.module).opened(folder, manifest)
    return found


@dataclass(frozen=True)
class LinearFolderArtifact(FolderArtifact):
    """An opened folder with Linears in a format of ours. Weights are known by their names in the checkpoint."""

    behind: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors that belong to a weight end so, after its own."""

    @cached_property
    def linears(self) -> dict[str, Any]:
        """How each Linear is stored, by its name."""
        try:
            return configured_linears(json.loads(self.folder.texts[CONFIG])["quantization_config"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ArtifactError) as error:
            raise ArtifactError(
                f"{self.path}: config.json is not understood ({shown(error)}); pack it again"
            ) from error

    @abstractmethod
    def stored_tensors(self, name: str) -> Stored:
        """What must be stored of a Linear, whose weight is there and is a matrix."""

    def how_stored(self, name: str) -> Any | None:
        """How a weight is stored; None for a tensor that is as in the checkpoint."""
        return self.linears.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def holds_weights(self, name: str) -> bool:
        return not name.endswith(tuple(f".weight{part}" for part in self.behind))

    def check_shapes(self) -> None:
        self._check_sites()
        for name in self.linears:
            weight = f"{name}.weight"
            if weight not in self.tensors or len(self.logical_shape(weight)) != 2:
                raise ArtifactError(f"{self.path}: {weight} is missing or no matrix; pack it again")
            for part, (of_shape, of_type) in self.stored_tensors(name).items():
                info = self.tensors.get(part)
                if info is None or info.shape != of_shape or info.type != of_type:
                    found = "missing" if info is None else f"{info.type} {list(info.shape)}"
                    raise ArtifactError(f"{self.path}: {part} is {found}, expected {of_type} {list(of_shape)}")
        for name, info in self.tensors.items():
            if self.how_stored(name) is None and self.logical_shape(name) != info.shape:
                raise ArtifactError(f"{self.path}: {name} has not the shape in the manifest; pack it again")

    def _check_sites(self) -> None:
        """The projections of a site share their input, which is treated alike for all of them."""
        family = family_of(self.manifest["model"]["model_type"], str(self.path))
        for site in family.projections:
            ways = [kind.projections[site] for kind in family.kinds]
            for prefix in {
                name[: -len(of)] for name in self.linears for way in ways for of in way if name.endswith(of)
            }:
                missing = [[of for of in way if prefix + of not in self.linears] for way in ways]
                if all(missing):
                    lacks = min(missing, key=len)[0]
                    raise ArtifactError(
                        f"{self.path}: {prefix}{lacks} is not stored as the others of its site are; pack it again"
                    )

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "evaluates it")
        yield Program("transformers", True, "from_pretrained, after `import sparsepack`")
        yield Program("llama.cpp", False, "it takes GGUF files; pack as q4_k for it")


def block_linears(checkpoint: Checkpoint) -> dict[tuple[int, str], list[str]]:
    """The Linears of every site of a model's blocks, by block and site, in the order in which they are stacked."""
    sites = ((layer, site) for layer in range(checkpoint.layers) for site in checkpoint.family_at(layer).projections)
    return {
        (layer, site): [
            f"{checkpoint.family.block(layer)}.{name}" for name in checkpoint.family_at(layer).projections[site]
        ]
        for layer, site in sites
    }


_OWN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def own_tensors(checkpoint: Checkpoint, linears: Mapping[str, Any]) -> Iterator[PlannedGroup]:
    """All tensors of a model but the weights of `linears`, in their own types."""
    source = checkpoint.source

    def own(name: str) -> Tensor:
        return as_bytes(checkpoint.tensor(name))

    for name, shape in source.shapes.items():
        if name.removesuffix(".weight") not in linears or not name.endswith(".weight"):
            yield alone(PlannedTensor(name, shape, _OWN_TYPES[source.dtypes[name]]), partial(own, name))


def as_bytes(value: Tensor) -> Tensor:
    """The bytes of a tensor: uint8 [bytes]."""
    return value.contiguous().view(-1).view(torch.uint8)


def folder_plan(
    format: Format,
    checkpoint: Checkpoint,
    request: PlanRequest,
    groups: Sequence[PlannedGroup],
    section: Mapping[str, Any],
    notes: Sequence[str] = (),
    at_once: int = 1,
    row_scales: bool = False,
) -> FolderPlan:
    """A folder of these tensors.

    section    -- what stands in `quantization_config` after method and format
    row_scales -- whether rows are divided by numbers before they are quantised
    """
    if request.attention is not None:
        section = {**section, "attention": True}
    notes = [*notes, *request.notes]
    return FolderPlan(
        format=format.name,
        groups=tuple(groups),
        notes=tuple(notes),
        at_once=at_once,
        source=checkpoint.source.hash,
        manifest=partial(
            make_manifest,
            format.name,
            checkpoint,
            request.provenance,
            manifest_shapes(tensors_of(groups)),
            notes,
            attention=request.attention,
            row_scales=row_scales,
        ),
        texts=model_texts(checkpoint, format.name, **section),
    )


def refuse_unknown(section: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ArtifactError` for the first key of a `quantization_config` that is not known: it may change what the
    tensors mean."""
    if others := sorted(set(section) - {"quant_method", "format", "attention", *known}):
        raise ArtifactError(
            f"quantization_config.{others[0][:60]}: this version of sparsepack does not know it; update sparsepack"
        )

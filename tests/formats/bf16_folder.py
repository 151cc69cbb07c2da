"""A format of its own in one file: the checkpoint's tensors in bfloat16, in a folder."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sparsepack.formats.artifact import Artifact, Program
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.safetensors import ArtifactFolder, FolderArtifact
from sparsepack.formats.containers.safetensors_writer import FolderPlan, model_texts
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.plan import PlannedTensor, PlanRequest, alone, manifest_shapes
from sparsepack.formats.table import Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint


class Bf16Folder(FolderArtifact):
    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", False, "evaluates it")


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    return Bf16Folder(manifest, folder)


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Refuse no model: the format holds every one."""


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    def encoded(name: str) -> Any:
        return BLOCKS[format.matrices.block].encode(checkpoint.tensor(name))

    shapes = checkpoint.source.shapes
    tensors = [PlannedTensor(name, shapes[name], format.matrices.block) for name in shapes]
    return FolderPlan(
        format=format.name,
        groups=tuple(alone(tensor, partial(encoded, tensor.name)) for tensor in tensors),
        source=checkpoint.source.hash,
        manifest=partial(make_manifest, format.name, checkpoint, request.provenance, manifest_shapes(tensors), ()),
        texts=model_texts(checkpoint, format.name),
    )

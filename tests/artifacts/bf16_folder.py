"""A format of its own in one file: the checkpoint's tensors in bfloat16, in a folder."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sparsepack.artifacts.artifact import Artifact, Program
from sparsepack.artifacts.folder.container import ArtifactFolder, FolderArtifact
from sparsepack.artifacts.folder.writer import FolderPlan, model_texts
from sparsepack.artifacts.formats import Format
from sparsepack.artifacts.manifest import make_manifest
from sparsepack.artifacts.plan import PlannedTensor, PlanRequest, alone, manifest_shapes
from sparsepack.codecs.matrices import encode_rows
from sparsepack.models.checkpoint import Checkpoint


class Bf16Folder(FolderArtifact):
    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", False, "evaluates it")


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    return Bf16Folder(manifest, folder)


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    def encoded(name: str) -> Any:
        return encode_rows(checkpoint.tensor(name), format.matrices)

    shapes = checkpoint.source.shapes
    tensors = [PlannedTensor(name, shapes[name], format.matrices) for name in shapes]
    return FolderPlan(
        format=format.name,
        groups=tuple(alone(tensor, partial(encoded, tensor.name)) for tensor in tensors),
        source=checkpoint.source.hash,
        manifest=partial(make_manifest, format.name, checkpoint, request.provenance, manifest_shapes(tensors), ()),
        texts=model_texts(checkpoint, format.name),
    )

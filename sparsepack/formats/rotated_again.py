"""An artifact of a rotated model beside the model that was rotated: that one in the artifact's basis.

The basis is not stored. It is found from the embedding, which is in the artifact once more, in the basis; so what is
compared with the artifact's matrices is the source's own weights, rotated by an orthogonal matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.manifest import PRUNING, ROTATION
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.procrustes import found_basis
from sparsepack.models.checkpoint.rotated import rotated

CHANGED_SINCE = (PRUNING,)
"""Under these keys the manifest says that weights were changed after the rotation, by more than types explain."""

LARGEST_UNCERTAINTY = 0.05
"""A basis that is less certain than this says little of the weights in it."""

_PIECE = 1 << 22
"""So many numbers of the embedding are decoded at one time."""


@dataclass(frozen=True)
class RotatedAgain:
    """A source model in an artifact's basis; by how much its weights may be off for that, relative."""

    checkpoint: Checkpoint
    uncertainty: float


def made_from_unrotated(manifest: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether an artifact was packed from what `rotate` made of a checkpoint, and nothing else was done to it."""
    rotation = manifest.get(ROTATION) or {}
    changed = any(manifest.get(key) for key in CHANGED_SINCE)
    return rotation.get("model_sha256") == checkpoint.sha256 and not changed


def rotated_again(artifact: Artifact, checkpoint: Checkpoint) -> RotatedAgain:
    """The source of a rotated model that was packed, in the artifact's basis.

    Raises `ArtifactError` where the embeddings do not say which basis that is.
    """
    stored, own = artifact.logical_shape(artifact.embedding), checkpoint.source.shapes[checkpoint.family.embedding]
    if stored != own:
        raise ArtifactError(f"{artifact.path}: its embedding is {list(stored)}, that of {checkpoint.name} {list(own)}")
    found = found_basis(_pairs(artifact, checkpoint))
    if not found.uncertainty <= LARGEST_UNCERTAINTY:
        raise ArtifactError(
            f"{artifact.path}: its embedding does not say in which basis the model is, beside that of "
            f"{checkpoint.name}; give --against the rotated checkpoint"
        )
    return RotatedAgain(rotated(checkpoint, found.basis), found.uncertainty)


def _pairs(artifact: Artifact, checkpoint: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the source's embedding, and the same rows of the artifact's."""
    embedding = checkpoint.tensor(checkpoint.family.embedding)
    step = max(_PIECE // embedding.shape[1], 1)
    for first in range(0, len(embedding), step):
        last = min(first + step, len(embedding))
        yield embedding[first:last], artifact.decoded(artifact.embedding, first, last)

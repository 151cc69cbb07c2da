"""An artifact of a rotated model beside the model that was rotated: that one in the artifact's basis.

The basis is not stored. It is found from the embedding, which is in the artifact once more, in the basis; so what is
compared with the artifact's matrices is the source's own weights, rotated by an orthogonal matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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


_DEVIATIONS = 4
"""A tensor may be off by so many times the uncertainty of the basis in which it is compared."""


@dataclass(frozen=True)
class RotatedAgain:
    """A source model in an artifact's basis.

    unturned    -- the same with its norms folded and nothing turned
    uncertainty -- by how much the basis may be off, relative
    """

    checkpoint: Checkpoint
    unturned: Checkpoint
    uncertainty: float

    def may_be_off(self, artifact: Artifact, name: str, source: Tensor) -> float:
        """By how much a tensor of the artifact may be off, relative, since its source is in a basis that was found:
        not at all where that is the same in any."""
        if source.dim() == 1:  # norms, biases of queries, keys and values; every matrix reads or writes the stream
            same = artifact.source(name, self.unturned)
            if same is not None and torch.equal(same, source):
                return 0.0
        return _DEVIATIONS * self.uncertainty


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
    return RotatedAgain(rotated(checkpoint, found.basis), rotated(checkpoint, None), found.uncertainty)


def _pairs(artifact: Artifact, checkpoint: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the source's embedding, and the same rows of the artifact's."""
    embedding = checkpoint.tensor(checkpoint.family.embedding)
    step = max(_PIECE // embedding.shape[1], 1)
    for first in range(0, len(embedding), step):
        last = min(first + step, len(embedding))
        yield embedding[first:last], artifact.decoded(artifact.embedding, first, last)

"""An artifact of a distilled model beside the model from before: how far its matrices were trained away from that.

The manifest says so of every matrix of the checkpoint. Tensors of an artifact are made of several, in formats of many
kinds; which ones is seen as they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from sparsepack.formats.artifact import Artifact
from sparsepack.formats.manifest import DISTILLATION, PRUNING
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.sources import changed_source


def made_from_undistilled(manifest: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether an artifact was packed from what `distil` made of a checkpoint, and nothing else was done to it since."""
    distillation = manifest.get(DISTILLATION) or {}
    pruned_since = manifest.get(PRUNING) and distillation.get("teacher") is None
    return distillation.get("model_sha256") == checkpoint.sha256 and not pruned_since


def trained_in_words(changes: Mapping[str, float]) -> str:
    """How far weights were trained away, as a clause."""
    largest = max(changes, key=lambda name: changes[name])
    return (
        f"trained since (distilled): each matrix may be off by as much as the manifest says, "
        f"{100 * changes[largest]:.2g} % at most ({largest})"
    )


@dataclass(frozen=True)
class Undistilled:
    """The model from before, and how far the matrices of its checkpoint were trained away, relative, by their names."""

    checkpoint: Checkpoint
    changes: Mapping[str, float]
    _read: set[str] = field(default_factory=set)

    def source(self, artifact: Artifact, name: str) -> tuple[Tensor | None, float]:
        """What the checkpoint has for a tensor of the artifact, and by how much that may be off: as the matrix in it
        that is the furthest away."""
        self._read.clear()
        found = artifact.source(name, self._watched)
        return found, max((self.changes.get(each, 0.0) for each in self._read), default=0.0)

    @cached_property
    def _watched(self) -> Checkpoint:
        return replace(self.checkpoint, source=changed_source(self.checkpoint.source, self._read.add))

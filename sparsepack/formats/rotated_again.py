"""An artifact of a rotated model beside the model that was rotated: that one in the artifact's basis.

The basis is not stored. It is found from the embedding, which is in the artifact once more, in the basis; so what is
compared with the artifact's matrices is the source's own weights, rotated by an orthogonal matrix. Where segments have
bases of their own, that is the first one. Each later one is the one before it, changed as the artifact's matrix between
them says, once that is orthogonal again. The bases of the values of its attention are found from v, once that is in the
basis of the stream.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.manifest import PRUNING, ROTATION
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import FROM_START, Bases, FoundBasis, found_basis, rotated, value_and_output
from sparsepack.models.hf_config import heads_of_config

CHANGED_SINCE = (PRUNING,)
"""Under these keys the manifest says that weights were changed after the rotation, by more than types explain."""

LARGEST_UNCERTAINTY = 0.05
"""A basis that is less certain than this says little of the weights in it."""

_PIECE = 1 << 22
"""So many numbers of the embedding are decoded at one time."""

_DEVIATIONS = 4
"""A tensor may be off by so many times the uncertainty of the basis in which it is compared."""

_ATTENTION = "attn"
"""The names of attention's tensors hold this, in any container."""

_OF_BLOCK = re.compile(r"(?:blk|layers)\.(\d+)\.")
"""The name of a block's tensor, in any container."""


@dataclass(frozen=True)
class RotatedAgain:
    """A source model in an artifact's bases.

    unturned      -- the same with its norms folded and nothing turned
    bases         -- those of the artifact's segments
    uncertainties -- by how much those of the stream may be off, relative
    of_values     -- by how much those of a block's values may be off, relative, the worst of a block
    """

    checkpoint: Checkpoint
    unturned: Checkpoint
    bases: Bases
    uncertainties: tuple[float, ...]
    of_values: tuple[float, ...]

    def in_words(self) -> str:
        """How surely it is found, as a clause."""
        changes = len(self.bases.boundaries)
        basis = "bases" if changes else "basis"
        also = f" and {changes} change{'s' if changes > 1 else ''} of basis" if changes else ""
        return (
            f"in the artifact's {basis}, found from its embedding{also} to within {max(self.uncertainties):.1g}, those "
            f"of values to within {max(self.of_values):.1g}"
        )

    def may_be_off(self, artifact: Artifact, name: str, source: Tensor) -> float:
        """By how much a tensor of the artifact may be off, relative, since its source is in a basis that was found:
        not at all where that is the same in any."""
        if source.dim() == 1:  # norms, biases of queries, keys and values; every matrix reads or writes the stream
            same = artifact.source(name, self.unturned)
            if same is not None and torch.equal(same, source):
                return 0.0
        return _DEVIATIONS * self._uncertainty(artifact, name)

    def _uncertainty(self, artifact: Artifact, name: str) -> float:
        """That of the bases of a tensor: the output matrix, which is of no block, has the last one of the stream."""
        of_block = _OF_BLOCK.search(name)
        if of_block is None:
            return self.uncertainties[0 if name == artifact.embedding else -1]
        layer = int(of_block[1])
        of_stream = self.uncertainties[self.bases.segment(layer)]
        return math.hypot(of_stream, self.of_values[layer]) if _ATTENTION in name else of_stream


def made_from_unrotated(manifest: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether an artifact was packed from what `rotate` made of a checkpoint, and nothing was done to it since whose
    changes the manifest does not tell."""
    rotation = manifest.get(ROTATION) or {}
    changed = any(manifest.get(key) for key in CHANGED_SINCE)
    return rotation.get("model_sha256") == checkpoint.sha256 and not changed


def rotated_again(artifact: Artifact, checkpoint: Checkpoint) -> RotatedAgain:
    """The source of a rotated model that was packed, in the artifact's bases.

    Raises `ArtifactError` where its embedding, or a matrix between segments, does not say which they are.
    """
    stored, own = artifact.logical_shape(artifact.embedding), checkpoint.source.shapes[checkpoint.family.embedding]
    if stored != own:
        raise ArtifactError(f"{artifact.path}: its embedding is {list(stored)}, that of {checkpoint.name} {list(own)}")
    first = found_basis(_pairs(artifact, checkpoint))
    _check(first, f"{artifact.path}: its embedding", checkpoint)
    changes, matrices, uncertainties = artifact.bases(), [first.basis], [first.uncertainty]
    if 0 in changes:
        raise ArtifactError(
            f"{artifact.path}: {changes[0]} is before any block, where nothing that was rotated has one"
        )
    for name in changes.values():
        change = artifact.decoded(name)
        found = found_basis([(torch.eye(len(change)), change)])
        _check(found, f"{artifact.path}: {name}", checkpoint)
        matrices.append(matrices[-1] @ found.basis.t())
        uncertainties.append(math.hypot(uncertainties[-1], found.uncertainty))
    stream = Bases((*FROM_START, *changes), tuple(matrices))
    of_blocks = list(_found_values(artifact, rotated(checkpoint, stream)))
    bases = replace(stream, values=tuple(torch.stack([found.basis for found in heads]) for heads in of_blocks))
    # A v that says nothing of its basis may be another model's: it is compared, and fails by its name.
    of_values = tuple(min(max(found.uncertainty for found in heads), LARGEST_UNCERTAINTY) for heads in of_blocks)
    turned, unturned = rotated(checkpoint, bases), rotated(checkpoint, Bases())
    return RotatedAgain(turned, unturned, bases, tuple(uncertainties), of_values)


def _found_values(artifact: Artifact, turned: Checkpoint) -> Iterator[list[FoundBasis]]:
    """The bases of the values of each KV head, block by block. turned: the source in the bases of the stream."""
    heads, stored = heads_of_config(turned.config), artifact.stock()
    for layer in range(turned.layers):
        name = f"{value_and_output(turned.family, layer)[0]}.weight"
        of_model, of_artifact = (
            # [kv_heads, hidden, D]
            torch.unflatten(tensor(name)[-heads.kv_heads * heads.head_dim :], 0, (heads.kv_heads, heads.head_dim)).mT
            for tensor in (turned.tensor, stored.tensor)
        )
        yield [found_basis([pair]) for pair in zip(of_model, of_artifact, strict=True)]


def _check(found: FoundBasis, what: str, checkpoint: Checkpoint) -> None:
    if not found.uncertainty <= LARGEST_UNCERTAINTY:
        raise ArtifactError(
            f"{what} does not say in which basis the model is, beside that of {checkpoint.name}; give --against the "
            "rotated checkpoint"
        )


def _pairs(artifact: Artifact, checkpoint: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the source's embedding, and the same rows of the artifact's."""
    embedding = checkpoint.tensor(checkpoint.family.embedding)
    step = max(_PIECE // embedding.shape[1], 1)
    for first in range(0, len(embedding), step):
        last = min(first + step, len(embedding))
        yield embedding[first:last], artifact.decoded(artifact.embedding, first, last)

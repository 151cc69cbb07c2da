"""`verify` says whether an artifact is intact, and whether it holds the weights of a given model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import ArtifactError
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.distilled_from import Undistilled, made_from_undistilled, trained_in_words
from sparsepack.formats.inspect import expected_bits
from sparsepack.formats.manifest import DISTILLATION, refit_in_words, weight_changes
from sparsepack.formats.open import open_artifact
from sparsepack.formats.rotated_again import RotatedAgain, made_from_unrotated, rotated_again
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.option import check_type

_PIECE, _BAND = 1 << 22, 256
"""The first number of weights is decoded at one time, the second number of rows is stored together."""


@dataclass(frozen=True)
class TensorError:
    """How far a stored tensor is from the model: relative Frobenius error, and the most that its type explains, and
    how its weights were fitted to their inputs."""

    name: str
    type: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound explains the error."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """The findings. `problems` are sentences; without any the file passed. `checked` are the checks that were made to
    their end, in their order: none after the one that failed."""

    path: str
    kind: str | None
    problems: tuple[str, ...]
    checked: tuple[str, ...]
    tensors: tuple[TensorError, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether the file has no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        tensors = [{**asdict(tensor), "passed": tensor.passed} for tensor in self.tensors]
        listed = {"problems": list(self.problems), "checked": list(self.checked), "tensors": tensors}
        return {"path": self.path, "kind": self.kind, "passed": self.passed, **listed}


def verify(path: Path | str, against: Checkpoint | str | Path | None = None) -> Report:
    """Check an artifact by itself: every byte's hash, shapes, zeros in padding, sparse attention that fits the model.

    against -- also compare every tensor with this checkpoint, some rows of a matrix at a time; one that `rotate` made
               the packed model from is rotated again; of one that `distil` made it from, matrices may be off by as much
               as they were trained

    Raises `ArtifactError` where there is nothing to check.
    """
    check_type("path", path, Path, ArtifactError)
    check_type("against", against, Checkpoint | Path | None, ArtifactError)
    checkpoint = None if against is None else checkpoint_of(against)
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or folder; expected what `sparsepack pack` made")
    kind = None
    checked: list[str] = []
    try:
        artifact = open_artifact(path)
        kind = artifact.manifest["kind"]
        checked.append("header")
        artifact.check_bytes()
        checked.append("SHA-256 of every tensor")
        artifact.check_shapes()
        checked.append("shapes")
        if (bits := expected_bits(artifact)) is not None:
            checked.append(f"levels of planes, {bits['in_words']}")
        if artifact.attention() is not None:
            checked.append("sparse attention")
        problems = tuple(artifact.padding_problems())
        checked.append("padding")
    except ArtifactError as error:
        problems = (str(error),)
    if checkpoint is None or problems:
        return Report(str(path), kind, problems, tuple(checked))
    what, again = f"weights of {checkpoint.name}", None
    if made_from_unrotated(artifact.manifest, checkpoint):
        try:
            again = rotated_again(artifact, checkpoint)
        except ArtifactError as error:
            return Report(str(path), kind, (str(error),), tuple(checked))
        what += f" {again.in_words()}"
    trained = again is not None or made_from_undistilled(artifact.manifest, checkpoint)
    changes = (artifact.manifest.get(DISTILLATION) or {}).get("changes", {}) if trained else {}
    if changes:
        what += f", {trained_in_words(changes)}"
    if (words := refit_in_words(artifact.manifest)) is not None:
        what += f", those of its blocks {words}"
    problems, tensors = _against(artifact, checkpoint, again, changes)
    return Report(str(path), kind, problems, (*checked, what), tensors)


def _against(
    artifact: Artifact, checkpoint: Checkpoint, again: RotatedAgain | None, trained: Mapping[str, float]
) -> tuple[tuple[str, ...], tuple[TensorError, ...]]:
    """The problems and the errors of every tensor of an intact artifact beside the model that it should be of.

    again   -- this model in the artifact's basis, which is compared in its place
    trained -- how far matrices of the checkpoint were trained away since, where they were
    """
    path, packed_from = artifact.path, artifact.manifest["model"]
    problems, tensors = [], []
    if again is None and not trained and packed_from["sha256"] != checkpoint.sha256:
        problems.append(
            f"{path}: packed from {packed_from['name']} (SHA-256 {packed_from['sha256'][:12]}), "
            f"{checkpoint.name} is {checkpoint.sha256[:12]}: another model, or another version of it"
        )
    if packed_from["model_type"] != checkpoint.family.model_type:
        problems.append(
            f"{path}: a {packed_from['model_type']} model, {checkpoint.name} is {checkpoint.family.model_type}"
        )
    else:
        for found in _compared(artifact, checkpoint, again, trained):
            if isinstance(found, str):
                problems.append(found)
            else:
                tensors.append(found)
    problems += [
        f"{t.name}: relative error {t.error:.3g}, {t.type} explains at most {t.bound:.3g}: not this model's weights"
        for t in tensors
        if not t.passed
    ]
    return tuple(problems), tuple(tensors)


def _compared(
    artifact: Artifact, checkpoint: Checkpoint, again: RotatedAgain | None, trained: Mapping[str, float]
) -> Iterator[TensorError | str]:
    before = Undistilled(checkpoint if again is None else again.checkpoint, trained)
    changes = weight_changes(artifact.manifest)
    for name in artifact.tensors:
        if not artifact.holds_weights(name):
            continue
        source, off = before.source(artifact, name)
        if source is None or tuple(source.shape) != artifact.logical_shape(name):
            shape = None if source is None else list(source.shape)
            yield f"{name}: {list(artifact.logical_shape(name))} in the file, {shape} in {checkpoint.name}"
            continue
        type = artifact.type_of_weights(name)
        bound = math.hypot(BLOCKS[type].error, again.may_be_off(artifact, name, source) if again else 0.0)
        bound += changes.get(name, 0.0) + off
        yield TensorError(name, type, _relative_error(artifact, name, source), bound)
    if artifact.output not in artifact.tensors and not before.checkpoint.tied:
        yield (
            f"{artifact.embedding}: the output matrix too in the file, {checkpoint.name} has another one: it was lost "
            "when this was packed, pack it again"
        )


def _relative_error(artifact: Artifact, name: str, expected: torch.Tensor) -> float:
    """|stored - expected| / |expected|, summed in float64 over pieces of whole bands of rows, or of whole experts."""
    rows = len(expected)
    step = max(_BAND, _PIECE // (expected.numel() // rows) // _BAND * _BAND) if expected.dim() > 1 else rows
    if expected.dim() == 3:  # of experts: as many of them as a piece has room for
        step = max(1, _PIECE // (expected.numel() // rows))
    difference = norm = 0.0
    for first in range(0, rows, step):
        piece = expected[first : first + step].double()
        norm += float(piece.square().sum())
        difference += float(piece.sub_(artifact.decoded(name, first, first + step)).square_().sum())
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return math.sqrt(difference / norm)

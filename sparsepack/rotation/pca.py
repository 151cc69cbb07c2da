"""The directions by how much of the residual stream lies in them: eigenvectors of its second moments, pooled over the
blocks of a segment, the largest first; and likewise of what the heads of attention give, for each KV head."""

import torch
from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.heads import output_moments
from sparsepack.calibration.residual import second_moments
from sparsepack.errors import RotationError
from sparsepack.files.resume import ResumeState
from sparsepack.models.checkpoint.bases import Bases
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.rotation.options import RotateOptions
from sparsepack.rotation.segments import check_count, chosen_segments, pooled


def check_model(checkpoint: Checkpoint) -> None:
    """Every model has one."""


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions, resume: ResumeState) -> Bases:
    """The bases of a model; the same for the same calibration. A direction that nothing lies in is as good as any
    other. Raises `RotationError` where the calibration has no second moments of this model, or for fewer runs of blocks
    than there should be segments."""
    found, outputs = second_moments(calibration), output_moments(calibration)
    hidden = int(checkpoint.config.hidden_size)
    if found is None or outputs is None or tuple(found[0][1].shape) != (hidden, hidden):
        raise RotationError(f"{checkpoint.name}: the calibration has no second moments of its {hidden} channels")
    check_count(checkpoint, options.segments, len(found))
    segments = chosen_segments(found, options.segments, options.device)
    starts = tuple(runs[0][0].start for runs in segments)
    values = tuple(torch.stack([directions(of_head) for of_head in moments]) for moments in outputs)
    return Bases(starts, tuple(directions(pooled(runs)) for runs in segments), values)


def directions(moments: Tensor) -> Tensor:
    """The eigenvectors of second moments, float64 [channels, channels], as columns, those of the largest eigenvalues
    first.

    Each points to the side on which its largest number is positive, which an eigenvector alone does not say.
    """
    vectors = torch.linalg.eigh((moments + moments.t()) / 2).eigenvectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)

"""The directions by how much of the residual stream lies in them: eigenvectors of its second moments, pooled over the
blocks of a segment, the largest first; and likewise of what the heads of attention give, for each KV head.

What is quantised in this basis decides two details, which cost no sparsity. The first direction is nearly a constant,
as large as all others together, and an error of the output matrix in it is an error of every logit. Its weights share
a scale with 15 others, those of large directions if these come next: `placed` gives the largest directions the smallest
ones as neighbours. Values of a head are quantised 32 rows at a time, and o has a column for each: `evened` spreads
every 32 directions evenly among themselves, so that large ones are still apart from small ones.
"""

import math

import torch
from torch import Tensor

from sparsepack.calibrate.bases import check_count, chosen_segments, hadamard, pooled
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.statistics import output_moments, second_moments
from sparsepack.errors import RotationError
from sparsepack.formats.blocks.q4_k import SUB
from sparsepack.formats.blocks.q6_k import SUB as OUTPUT_SUB
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import Bases

ALONE = 4
"""So many of the largest directions share a scale with none of similar size."""


def check_model(checkpoint: Checkpoint) -> None:
    """Every model has one."""


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions) -> Bases:
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
    values = tuple(torch.stack([evened(directions(of_head)) for of_head in moments]) for moments in outputs)
    return Bases(starts, tuple(placed(directions(pooled(runs))) for runs in segments), values)


def directions(moments: Tensor) -> Tensor:
    """The eigenvectors of second moments, float64 [channels, channels], as columns, those of the largest eigenvalues
    first.

    Each points to the side on which its largest number is positive, which an eigenvector alone does not say.
    """
    vectors = torch.linalg.eigh((moments + moments.t()) / 2).eigenvectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def placed(vectors: Tensor) -> Tensor:
    """Directions by falling size, as columns [channels, channels], in the order in which they become channels: each of
    the few largest is followed by the smallest that are left, which fill its sub-block of Q6_K. All others keep their
    order, and so do those of a model that is too narrow."""
    channels, beside = vectors.shape[1], OUTPUT_SUB - 1
    alone = min(ALONE, channels // (8 * OUTPUT_SUB))
    smallest = [range(channels - (one + 1) * beside, channels - one * beside) for one in range(alone)]
    beginning = [channel for one in range(alone) for channel in (one, *smallest[one])]
    return vectors[:, [*beginning, *range(alone, channels - alone * beside)]]


def evened(vectors: Tensor) -> Tensor:
    """Directions as columns [channels, channels] -> such that every run of 32 spans what it did and has directions of
    even size; the same where 32 does not divide their number."""
    mixed = hadamard(SUB)
    if vectors.shape[1] % SUB or mixed is None:
        return vectors
    mixed = mixed.to(vectors) / math.sqrt(SUB)
    return (torch.unflatten(vectors, 1, (-1, SUB)) @ mixed).flatten(1)

"""Which consecutive blocks make a segment with a basis of its own: where one basis would lose most.

A segment's basis Q are the eigenvectors of its blocks' second moments M, pooled. What skipping the smaller half of the
channels loses in a block is the smaller half of diag(Q^T M Q), as a share of the trace of M. The segments are those for
which the sum over all blocks is least, by dynamic programming. Blocks whose moments the calibration pooled stay in one
segment.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from sparsepack.errors import RotationError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.progress import progress

Run = tuple[range, Tensor]
"""A run of consecutive blocks, and the mean of its second moments, float64 [hidden, hidden]."""

_STEPS = 10**9
"""Losses are compared in so many steps of a block's whole energy, so that those that are the same but for rounding
are."""


def check_count(checkpoint: Checkpoint, segments: int, runs: int) -> None:
    """Raise `RotationError` for more segments than runs of blocks that have second moments."""
    if segments <= runs:
        return
    blocks = f"{checkpoint.layers} blocks"
    why = "" if runs == checkpoint.layers else f", of which a calibration keeps second moments in {runs} runs"
    raise RotationError(f"{checkpoint.name}: {segments} segments of {blocks}{why}; expected at most {runs}")


def pooled(runs: Sequence[Run]) -> Tensor:
    """The mean second moments of all blocks of some runs, float64 [hidden, hidden]."""
    total = sum((len(blocks) * moments for blocks, moments in runs), torch.zeros_like(runs[0][1]))
    return total / sum(len(blocks) for blocks, _ in runs)


def chosen_segments(runs: Sequence[Run], count: int, device: str = "cpu") -> list[Sequence[Run]]:
    """The runs of each of `count` segments, of all that there are, by what is lost. Where that is the same, segments
    are as even as they can be, and begin early."""
    ends: Sequence[int] = [len(runs)]
    if count == len(runs):
        ends = range(1, len(runs) + 1)
    elif count > 1:
        possible = _possible(len(runs), count)
        with progress("choosing segments", len(possible)) as advance:
            losses = {}
            for first, end in possible:
                segment = runs[first:end]
                shares = zip(segment, energy_lost(segment, device), strict=True)
                losses[first, end] = sum(len(blocks) * round(share * _STEPS) for (blocks, _), share in shares)
                advance()
        ends = _best([len(blocks) for blocks, _ in runs], losses, count)
    return [runs[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def energy_lost(runs: Sequence[Run], device: str = "cpu") -> list[float]:
    """The share of the energy that skipping half of the channels loses in a block of each run, in one basis for all."""
    place = torch.device("cpu" if device == "mps" else device)  # Apple's GPUs have no float64
    basis = torch.linalg.eigh(pooled(runs).to(place)).eigenvectors
    lost = []
    for _, moments in runs:
        sizes = (basis * (moments.to(place) @ basis)).sum(0).clamp_min(0).sort().values
        whole = float(sizes.sum())
        lost.append(float(sizes[: len(sizes) // 2].sum()) / whole if whole else 0.0)
    return lost


def _possible(runs: int, count: int) -> list[tuple[int, int]]:
    """First run and end of each segment that is one of `count`."""
    found = []
    for first in range(runs):
        for end in range(first + 1, runs + 1):
            # Its number among the segments: at least one before it where there are runs, and as many after it.
            least = max(int(first > 0), count - 1 - (runs - end))
            most = min(first, count - 1 - int(end < runs))
            if least <= most:
                found.append((first, end))
    return found


def _best(lengths: Sequence[int], losses: Mapping[tuple[int, int], int], count: int) -> tuple[int, ...]:
    """The ends of the segments that lose least.

    lengths -- how many blocks each run has
    losses  -- of each possible segment
    """

    @cache
    def best(first: int, parts: int) -> tuple[int, int, tuple[int, ...]]:
        """Loss, sum of squares and ends of the best `parts` segments from a run on."""
        ends = [len(lengths)] if parts == 1 else range(first + 1, len(lengths) - parts + 2)
        candidates = []
        for end in ends:
            loss, squares, later = best(end, parts - 1) if parts > 1 else (0, 0, ())
            blocks = sum(lengths[first:end])
            candidates.append((losses[first, end] + loss, blocks**2 + squares, (end, *later)))
        return min(candidates)

    return best(0, count)[2]

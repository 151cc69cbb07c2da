"""The threshold controller (`--hold`): scales the thresholds of each sequence token by token, so that the share of
weights that it skips stays at the target on any sequence.

The controller is integral: what a token misses of the target moves the logarithm of the scale, much at first and less
with every token, so that the scale is soon there and one token does not swing it (Robbins and Monro's stochastic
approximation), but never nothing, so that the scale follows a sequence that changes. It keeps two numbers a sequence,
the same on every backend (`cpu/native/decoder/threshold_controller.h`,
`cuda/kernels/decoder/threshold_controller.cuh`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.activity import sparse_sites_of

FIRST_GAIN, LAST_GAIN, GAIN_TOKENS = 0.15, 0.01, 16.0
LEAST_SCALE, MOST_SCALE = 0.5, 2.0


@dataclass(frozen=True)
class SequenceScale:
    """The scale of a sequence's thresholds, rounded to float32, and its number of sparse steps."""

    scale: float = 1.0
    steps: int = 0


@dataclass(frozen=True)
class ThresholdController:
    """The target, and the gain of the controller.

    target      -- share of the weights of the sites that may be sparse
    weights     -- the number of these weights
    first, last -- the gain: a token moves the logarithm of the scale by this multiple of what it misses of the target.
                   Of a sequence's first token, and the least of later ones
    over        -- after so many tokens the gain is half of the first
    least, most -- the scale stays between them
    """

    target: float
    weights: int
    first: float = FIRST_GAIN
    last: float = LAST_GAIN
    over: float = GAIN_TOKENS
    least: float = LEAST_SCALE
    most: float = MOST_SCALE

    def after(self, sequence: SequenceScale, skipped: int) -> SequenceScale:
        """Return the scale after a sparse step that skipped so many of the weights. Computed in float64."""
        gain = max(self.last, self.first / (1 + sequence.steps / self.over))
        # 1 + y in place of exp(y), where y is a few thousandths: every device computes it alike.
        scale = sequence.scale * (1 + gain * (self.target - skipped / self.weights))
        return SequenceScale(float(np.float32(min(max(scale, self.least), self.most))), sequence.steps + 1)


def new_controller(packed: PackedModel) -> ThresholdController:
    """Return the controller that keeps a model at the target that its thresholds were made for. Raises `UserError` for
    a model without thresholds, and for a target that is not known or nothing."""
    rules, target = packed.rules, packed.sparsity
    option = "--sparsity" if packed.plane_bits is None else "--bits"
    if not rules:
        raise UserError(
            f"hold: the model has no thresholds that could be scaled; pack it with --calibration and {option}, or "
            "leave it out"
        )
    if not 0 < target < 1:
        raise UserError(
            f"hold: the model's thresholds were made for a share of {target:g}; expected one between 0 and 1; pack it "
            f"with {option}, or leave it out"
        )
    parameters = packed.parameters
    return ThresholdController(
        target, sum(parameters[key] for key in sparse_sites_of(packed.manifest, rules) if key in parameters)
    )


@dataclass(frozen=True)
class StepScales:
    """The scales of a step, one position of each of S sequences.

    scales  -- float32 [S]
    skipped -- int64 [S]: the weights in inactive columns, of the sites so far
    """

    scales: Tensor
    skipped: Tensor

    def scaled(self, thresholds: Tensor) -> Tensor:
        """The thresholds of a site, a scalar or [columns], for each sequence: float32 [S, 1 or columns]."""
        return self.scales[:, None] * thresholds

    def count(self, inactive: Tensor, rows: int) -> None:
        """Count a site of so many rows: int64 [S] of its columns are inactive."""
        self.skipped.add_(rows * inactive)


class SequenceScales:
    """The scales of a decoder in torch, one for each sequence."""

    def __init__(self, controller: ThresholdController, sequences: int, device: torch.device) -> None:
        self._controller, self._device = controller, device
        self._sequences = [SequenceScale()] * sequences

    @property
    def scales(self) -> tuple[float, ...]:
        """What the thresholds of each sequence are multiplied by."""
        return tuple(each.scale for each in self._sequences)

    def reset(self, sequence: int) -> None:
        """Reset the scale of a sequence."""
        self._sequences[sequence] = SequenceScale()

    def reset_all(self) -> None:
        """Reset every scale."""
        self._sequences = [SequenceScale()] * len(self._sequences)

    def begin_step(self, sequences: Sequence[int]) -> StepScales:
        """Return the scales of a sparse step."""
        scales = torch.tensor(
            [self._sequences[each].scale for each in sequences], dtype=torch.float32, device=self._device
        )
        return StepScales(scales, torch.zeros(len(sequences), dtype=torch.int64, device=self._device))

    def end_step(self, sequences: Sequence[int], step: StepScales) -> None:
        """Update the scales after that step."""
        for each, skipped in zip(sequences, step.skipped.tolist(), strict=True):
            self._sequences[each] = self._controller.after(self._sequences[each], skipped)

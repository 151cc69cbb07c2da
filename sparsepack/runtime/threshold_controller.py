"""A held share: each text's thresholds are scaled token by token, so that the share of weights that it skips stays at
the target on whatever text.

The controller is integral: what a token misses of the target moves the logarithm of the scale, much at first and less
with every token, so that the scale is soon there and one token does not swing it (Robbins and Monro's stochastic
approximation), but never nothing, so that the scale follows a text that changes. It keeps two numbers a text, the same
on every backend (`cpu/native/decoder/hold.h`, `cuda/kernels/decoder/threshold_controller.cuh`).
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
class TextScale:
    """What is known of a text: what its thresholds are multiplied by, rounded to float32, and how many sparse steps it
    has made."""

    scale: float = 1.0
    steps: int = 0


@dataclass(frozen=True)
class ThresholdController:
    """What is held, and how firmly.

    target      -- share of the weights of the sites that may be sparse
    weights     -- the number of these weights
    first, last -- the gain: a token moves the logarithm of the scale by this multiple of what it misses of the target.
                   Of a text's first token, and the least of later ones
    over        -- after so many tokens the gain is half of the first
    least, most -- the scale stays between them: what they cannot reach is not held
    """

    target: float
    weights: int
    first: float = FIRST_GAIN
    last: float = LAST_GAIN
    over: float = GAIN_TOKENS
    least: float = LEAST_SCALE
    most: float = MOST_SCALE

    def after(self, text: TextScale, skipped: int) -> TextScale:
        """A text after a sparse step that skipped so many of the weights. Computed in float64."""
        gain = max(self.last, self.first / (1 + text.steps / self.over))
        # 1 + y in place of exp(y), where y is a few thousandths: every device computes it alike.
        scale = text.scale * (1 + gain * (self.target - skipped / self.weights))
        return TextScale(_float32(min(max(scale, self.least), self.most)), text.steps + 1)


def _float32(x: float) -> float:
    return float(np.float32(x))


def threshold_controller_of(packed: PackedModel) -> ThresholdController:
    """What a model's share is held at: the target that its thresholds were made for. Raises `UserError` for a model
    without thresholds, and for a target that is not known or nothing."""
    rules, target = packed.rules, packed.sparsity
    if not rules:
        raise UserError(
            "hold: the model has no thresholds that could be scaled; pack it with --calibration and --sparsity, or "
            "leave it out"
        )
    if not 0 < target < 1:
        raise UserError(
            f"hold: the model's thresholds were made for a share of {target:g}; expected one between 0 and 1; pack it "
            "with --sparsity, or leave it out"
        )
    parameters = packed.parameters
    return ThresholdController(
        target, sum(parameters[key] for key in sparse_sites_of(packed.manifest, rules) if key in parameters)
    )


@dataclass(frozen=True)
class StepScales:
    """A step of some texts, a position of each.

    scales  -- float32 [texts]
    skipped -- int64 [texts]: the weights in inactive columns, of the sites so far
    """

    scales: Tensor
    skipped: Tensor

    def limits(self, thresholds: Tensor) -> Tensor:
        """The thresholds of a site, a scalar or [columns], for each text: float32 [texts, 1 or columns]."""
        return self.scales[:, None] * thresholds

    def count(self, inactive: Tensor, rows: int) -> None:
        """Count a site of so many rows: int64 [texts] of its columns are inactive."""
        self.skipped.add_(rows * inactive)


class TextScales:
    """What decoders in torch know of their texts, where a share is held."""

    def __init__(self, controller: ThresholdController, texts: int, device: torch.device) -> None:
        self._controller, self._device = controller, device
        self._texts = [TextScale()] * texts

    @property
    def scales(self) -> tuple[float, ...]:
        """What each text's thresholds are multiplied by."""
        return tuple(text.scale for text in self._texts)

    def begin(self, text: int) -> None:
        """Let a text begin anew."""
        self._texts[text] = TextScale()

    def begin_all(self) -> None:
        """Let every text begin anew."""
        self._texts = [TextScale()] * len(self._texts)

    def step(self, texts: Sequence[int]) -> StepScales:
        """A sparse step of these texts begins."""
        scales = torch.tensor([self._texts[text].scale for text in texts], dtype=torch.float32, device=self._device)
        return StepScales(scales, torch.zeros(len(texts), dtype=torch.int64, device=self._device))

    def stepped(self, texts: Sequence[int], step: StepScales) -> None:
        """That step has ended."""
        for text, skipped in zip(texts, step.skipped.tolist(), strict=True):
            self._texts[text] = self._controller.after(self._texts[text], skipped)

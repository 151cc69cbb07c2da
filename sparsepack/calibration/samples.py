"""How many windows are calibrated on where nobody says so, as many as a processor takes in a few minutes, and how many
of them at a time."""

import math

import torch

from sparsepack.calibration.options import FEW_AT_ONCE, FEWEST_SAMPLES, MOST_SAMPLES, TOKENS_AT_ONCE
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.workers import PARTS

WORK = 1.5e13
"""Weights times tokens: two cores take about six minutes for so much. A model with 900 million weights in its blocks
gets `FEWEST_SAMPLES` windows of 2048 tokens by this, one with 57 million gets `MOST_SAMPLES`."""


def samples_of(checkpoint: Checkpoint, asked: int | None, context: int, device: str) -> int:
    """The number of windows to draw, 0 for all: what is asked for; else `MOST_SAMPLES`, or on a CPU as many as `WORK`
    has room for, `FEWEST_SAMPLES` at least."""
    if asked is not None:
        return asked
    if device != "cpu":
        return MOST_SAMPLES
    blocks = range(checkpoint.layers)
    weights = sum(math.prod(checkpoint.stacked_shape(site, layer)) for layer in blocks for site in SITES)
    return max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(WORK / (weights * context))))


def at_once(asked: int | None, windows: int, context: int, device: str) -> int:
    """How many of so many windows run at a time: what is asked for, or what suits a device; see `CalibrateOptions`."""
    if asked is not None:
        return asked
    if torch.device(device).type != "cuda":
        return FEW_AT_ONCE
    return max(FEW_AT_ONCE, min(TOKENS_AT_ONCE // context, windows // PARTS))

"""The options of a rotation. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.calibrate.collect import DTYPES, CalibrateOptions
from sparsepack.errors import RotationError
from sparsepack.option import LARGEST_SEED, check_options, only_with, option

BASES = ("pca", "hadamard", "learnt")
"""The names in the table of bases (`bases`)."""

_LEARNT = (only_with("basis", "learnt"),)


@dataclass(frozen=True)
class RotateOptions:
    """Which bases, and how the rotated model is stored."""

    basis: str = option(
        "The directions: by how much of the residual stream lies in each, so that channels differ as far as they can, "
        "which suits skipping (pca); or each spread over all channels, so that they are as even as they can be, which "
        "suits inputs in 8 bits (hadamard); or those of pca, turned on so that skipping changes the output less, "
        "which takes the whole model in memory, and a GPU (learnt).",
        default="pca",
        choices=BASES,
    )
    segments: int = option(
        "Runs of consecutive blocks, each with a basis of its own; a matrix before each but the first takes the stream "
        "into it, and is read for every token.",
        default=1,
        least=1,
        counts=(only_with("basis", "pca", "learnt"),),
    )
    seed: int = option(
        "With hadamard: the signs of the channels; with learnt: which windows are drawn.",
        default=0,
        least=0,
        most=LARGEST_SEED,
        counts=(only_with("basis", "hadamard", "learnt"),),
    )
    sparsity: float = option(
        "With learnt: the share of weights that a decoded token will skip.",
        default=0.5,
        above=0,
        below=1,
        counts=_LEARNT,
    )
    steps: int = option("With learnt: optimiser steps.", default=300, least=1, counts=_LEARNT)
    batch: int = option("With learnt: windows per step.", default=4, least=1, counts=_LEARNT)
    length: int = option("With learnt: tokens per window.", default=1024, least=2, counts=_LEARNT)
    rate: float = option(
        "With learnt: how far one step turns the basis at most, roughly, in radians.",
        default=0.006,
        least=0,
        below=1,
        counts=_LEARNT,
    )
    weights: str = option(
        "The type in which the rotated weights are stored; auto: the model's own, or float32 where that has 16 bits, "
        "since rounding the weights a second time changes the model.",
        default="auto",
        choices=DTYPES,
    )
    device: str = CalibrateOptions.device

    def check(self) -> None:
        """Raise `RotationError` for values that make no sense."""
        check_options(self, RotationError)

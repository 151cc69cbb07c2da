"""`rotate`: its options, what it declares, and what was rotated as text for people."""

from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.operation import Input, Operation

if TYPE_CHECKING:
    from sparsepack.models.provenance import Rotated
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


def rotated_text(made: "Rotated", output: Path) -> str:
    """What was rotated, how far its logits are from the model's, and what it costs."""
    from sparsepack.models.provenance import basis_in_words

    into = basis_in_words(made.options["basis"], made.boundaries)
    lines = [
        f"{output}: {made.model} in {into}; over {made.tokens:,} tokens its logits differ by {made.error:.1e} of their "
        "size",
        *(f"note: {note}" for note in made.notes),
    ]
    return "\n".join(lines)


ROTATE = Operation(
    name="rotate",
    summary="Write a model in coordinates in which skipping loses less.",
    help="""
Write MODEL with its residual stream in another basis: the same function, folded into the weights.

The result is an ordinary checkpoint, or with several segments one that sparsepack alone takes; calibrate that one
for what follows. Its logits are compared with those of MODEL, and nothing is written where they differ. One decoder
block is in memory at a time; a learnt basis needs the whole model there, and is for a GPU. A run that was killed
goes on where it stopped when the same command is given again. With --devices, or under torchrun, several workers
share the blocks, and the windows on which a basis is learnt; the result has the same bytes.
""",
    options=RotateOptions,
    groups={"A learnt basis": ("sparsity", "steps", "batch", "length", "rate")},
    inputs={
        "calibration": Input(
            "A folder made by `sparsepack calibrate` of MODEL, for its statistics and its text.", required=True
        )
    },
    run="sparsepack.calibrate.rotation:rotate",
    forecast="sparsepack.calibrate.rotation:forecast",
    table=rotated_text,
    output="The checkpoint to make, a folder.",
)

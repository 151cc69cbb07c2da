"""The options of a rotation. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.calibration.options import DTYPES, CalibrateOptions
from sparsepack.errors import RotationError
from sparsepack.option import LARGEST_SEED, check_options, only_with, option

BASES = ("pca", "hadamard")
"""The names in the table of bases (`rotation.bases`)."""


@dataclass(frozen=True)
class RotateOptions:
    """Which basis, and how the rotated model is stored."""

    basis: str = option(
        "The directions: by how much of the residual stream lies in each, so that channels differ as far as they can, "
        "which suits skipping (pca); or each spread over all channels, so that they are as even as they can be, which "
        "suits inputs in 8 bits (hadamard).",
        default="pca",
        choices=BASES,
    )
    seed: int = option(
        "With hadamard: the signs of the channels.",
        default=0,
        least=0,
        most=LARGEST_SEED,
        counts=(only_with("basis", "hadamard"),),
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

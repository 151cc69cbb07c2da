"""The options of a distillation. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.calibration.options import DTYPES, CalibrateOptions
from sparsepack.errors import DistillationError
from sparsepack.option import LARGEST_SEED, check_options, option
from sparsepack.sparsity.options import AllocationOptions

RATE_OF_WEIGHTS, RATE_OF_UPDATES = 3e-5, 3e-4
"""The rates of all weights and of updates of a rank, where none is asked for."""


@dataclass(frozen=True)
class DistilOptions:
    """What the weights are trained for, how, and how the distilled model is stored."""

    sparsity: float = option("The share of weights that a decoded token will skip.", default=0.5, above=0, below=1)
    offsets: bool = option(
        "What inactive channels stand at is learnt, too: for a model that is packed with --offsets.", default=False
    )
    rank: int | None = option(
        "Train an update of this rank for each matrix of the blocks, which takes little memory beside the model "
        "(default: all of their weights, 16 more bytes for each).",
        default=None,
        least=1,
    )
    rate: float | None = option(
        f"Learning rate (default: {RATE_OF_WEIGHTS:g} of all weights, {RATE_OF_UPDATES:g} of updates).",
        default=None,
        above=0,
        below=1,
    )
    prompt: float = option(
        "How much the divergence of prompts, which are dense, counts beside that of what is decoded.",
        default=0.5,
        least=0,
    )
    steps: int = option("Optimiser steps.", default=300, least=1)
    batch: int = option("Windows per step.", default=4, least=1)
    length: int = option("Tokens per window.", default=1024, least=2)
    seed: int = option("Which windows are drawn, and how updates begin.", default=0, least=0, most=LARGEST_SEED)
    weights: str = option(
        "The type in which the weights are stored; auto: the model's own, or float32 where that has 16 bits, which "
        "would round small changes away.",
        default="auto",
        choices=DTYPES,
    )
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `DistillationError` for values that make no sense."""
        check_options(self, DistillationError)

    @property
    def learning_rate(self) -> float:
        """The rate that was asked for, or that suits what is trained."""
        return self.rate or (RATE_OF_WEIGHTS if self.rank is None else RATE_OF_UPDATES)

    @property
    def allocation(self) -> AllocationOptions:
        """How thresholds begin that are trained along: as those of `global` do."""
        return AllocationOptions(
            self.sparsity, "global", offsets=self.offsets, length=self.length, device=self.device, dtype=self.dtype
        )

"""What an allocation is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.calibration.options import CRITERIA, CalibrateOptions
from sparsepack.errors import ThresholdsError
from sparsepack.option import LARGEST_SEED, check_options, not_with, only_with, option
from sparsepack.sparsity.allocations import ALLOCATIONS

UPSTREAMS = ("sparse", "dense")

_SOUGHT = (only_with("sparsity"),)
"""A verb may be told no target; then no thresholds are sought."""
_LEARNT = (*_SOUGHT, only_with("allocation", *(row.name for row in ALLOCATIONS.values() if row.trains)))


@dataclass(frozen=True)
class AllocationOptions:
    """What the user asks for. Sites are named or matched by patterns: `blk.3.mlp_mid`, `blk.*.attn_in`, `re:...`."""

    sparsity: float = option(
        "Target: share of the weights that a decoded token skips, of the sites that may be sparse.", least=0, below=1
    )
    allocation: str = option(
        "How the target is shared out: each channel by the gradient of the model's output (fisher); evenly; TEAL's "
        "greedy per block; thresholds trained on the model's output (global).",
        default="fisher",
        choices=tuple(ALLOCATIONS),
        counts=_SOUGHT,
    )
    criterion: str = option(
        "Score of channel j: |x_j|, or |x_j| times the norm of its column.",
        default="magnitude",
        choices=CRITERIA,
        counts=(*_SOUGHT, not_with("allocation", "fisher")),
    )
    include: tuple[str, ...] = option(
        "Only these sites may be sparse: blk.3.mlp_mid, blk.*.attn_in, re:REGEX.", default=(), counts=_SOUGHT
    )
    ignore: tuple[str, ...] = option("These sites stay dense.", default=(), counts=_SOUGHT)
    upstream: str = option(
        "Activations that thresholds are taken on: with all before a site sparse, or dense as in the papers.",
        default="sparse",
        choices=UPSTREAMS,
        counts=_SOUGHT,
    )
    windows: int = option("Calibration windows that thresholds are taken on.", default=16, least=1, counts=_SOUGHT)
    offsets: bool = option(
        "With global: also learn what inactive channels stand at (R-Sparse's idea); costs nothing later.",
        default=False,
        counts=_LEARNT,
    )
    steps: int = option("With global: optimiser steps.", default=300, least=1, counts=_LEARNT)
    batch: int = option("With global: windows per step.", default=4, least=1, counts=_LEARNT)
    length: int = option("With global: tokens per window.", default=1024, least=2, counts=_LEARNT)
    seed: int = option("With global: which windows are drawn.", default=0, least=0, most=LARGEST_SEED, counts=_LEARNT)
    device: str = "cpu"
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `ThresholdsError` for values out of range."""
        check_options(self, ThresholdsError)
        for name, problem in ALLOCATIONS[self.allocation].problems(self.upstream, self.windows != type(self).windows):
            raise ThresholdsError(f"{name}: {problem}")

"""What an allocation is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.calibrate.options import CRITERIA, CalibrateOptions
from sparsepack.errors import ThresholdsError

ALLOCATIONS = ("uniform", "teal", "global")
UPSTREAMS = ("sparse", "dense")


@dataclass(frozen=True)
class AllocationOptions:
    """What the user asks for.

    sparsity   -- target share of weights that a decoded token skips, over the sites that may be sparse
    include    -- names or patterns of the sites that may be sparse (`blk.3.mlp_mid`, `blk.*.attn_in`, `re:...`)
    ignore     -- those that stay dense
    upstream   -- "sparse" or "dense" (the papers' way)
    windows    -- calibration windows that thresholds are taken on, of those in the calibration
    offsets    -- `global` also learns what inactive channels stand at, folded into a bias (R-Sparse's idea)
    steps, batch, length -- `global`: optimiser steps, windows per step, tokens per window
    """

    sparsity: float
    allocation: str = "uniform"
    criterion: str = "magnitude"
    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    upstream: str = "sparse"
    windows: int = 16
    offsets: bool = False
    steps: int = 300
    batch: int = 4
    length: int = 1024
    seed: int = 0
    device: str = "cpu"
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `ThresholdsError` for values out of range."""
        if not 0 <= self.sparsity < 1:
            raise ThresholdsError(f"sparsity {self.sparsity}: expected at least 0 and below 1 (0.5 skips half)")
        for name, value, known in (
            ("allocation", self.allocation, ALLOCATIONS),
            ("criterion", self.criterion, CRITERIA),
            ("upstream", self.upstream, UPSTREAMS),
        ):
            if value not in known:
                raise ThresholdsError(f"{name} {value!r}: expected one of {', '.join(known)}")
        for name, count, least in (
            ("windows", self.windows, 1),
            ("steps", self.steps, 1),
            ("batch", self.batch, 1),
            ("length", self.length, 2),
        ):
            if count < least:
                raise ThresholdsError(f"{name} {count}: expected at least {least}")
        if self.offsets and self.allocation != "global":
            raise ThresholdsError("offsets are learnt from the model's output: they need --allocation global")
        if self.allocation == "global" and self.upstream == "dense":
            raise ThresholdsError("--allocation global runs the whole sparse model: it has no dense upstream")

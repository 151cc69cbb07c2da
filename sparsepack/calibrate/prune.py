"""The options of pruning. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass
from pathlib import Path

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import PruningError
from sparsepack.models.records.pattern import LARGEST_GROUP
from sparsepack.option import check_options, only_with, option

METHODS = ("magnitude", "wanda", "sparsegpt")
_READS_TEXT = only_with("method", *METHODS[1:])


@dataclass(frozen=True)
class SitePattern:
    """Another pattern for the sites that a pattern of names matches; `keep` equal to `of` leaves them as they are."""

    site: str
    keep: int
    of: int


@dataclass(frozen=True)
class PruneOptions:
    """How many weights stay, and how they are chosen. Sites are named as in `AllocationOptions`."""

    keep: int = option("Nonzero weights that stay in each group of consecutive inputs of a row.", least=1)
    of: int = option("Inputs in a group, from the first input of a matrix on.", least=2, most=LARGEST_GROUP)
    method: str = option(
        "What decides: the weights' size; that times the size of their inputs (Wanda); the error of the output, which "
        "the weights that stay make up for (SparseGPT).",
        default="sparsegpt",
        choices=METHODS,
    )
    permute: bool = option(
        "First put neurons and value channels into an order in which less is lost; the model computes the same.",
        default=False,
    )
    include: tuple[str, ...] = option(
        "Only these sites are pruned: blk.3.mlp_mid, blk.*.attn_in, re:REGEX.", default=()
    )
    ignore: tuple[str, ...] = option("These sites are left as they are.", default=())
    sites: tuple[SitePattern, ...] = option(
        "Other patterns for sites by name or pattern, keep equal to of for none; the last that matches counts.",
        default=(),
    )
    windows: int = option("Calibration windows that are run.", default=128, least=1, counts=(_READS_TEXT,))
    damping: float = option(
        "With sparsegpt: what is added to the inputs' second moments, as a share of their mean.",
        default=0.01,
        above=0,
        most=1,
        counts=(only_with("method", "sparsegpt"),),
    )
    batch: int = option("Windows at a time.", default=2, least=1, counts=(_READS_TEXT,))
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    def check_calibration(self, calibration: Path | None) -> None:
        """Raise `PruningError` where the method needs a calibration and there is none, or reads none and there is."""
        if self.method == METHODS[0] and calibration is not None:
            raise PruningError(f"calibration {calibration}: method {self.method} reads no text; leave it out")
        if self.method != METHODS[0] and calibration is None:
            raise PruningError(f"method {self.method}: it needs the inputs of the matrices; give --calibration")

    def check(self) -> None:
        """Raise `PruningError` for values that make no sense."""
        check_options(self, PruningError)
        for keep, of, where in ((self.keep, self.of, ""), *((s.keep, s.of, f"{s.site}: ") for s in self.sites)):
            if not 1 <= keep <= of or not 2 <= of <= LARGEST_GROUP or (keep == of and not where):
                raise PruningError(f"{where}keep {keep} of {of}: expected 1 <= keep < of <= {LARGEST_GROUP}")

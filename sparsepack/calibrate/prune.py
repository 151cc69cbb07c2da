"""`prune`: its options, what it declares, and what was pruned as text for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsepack.operation import Input, Operation
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.provenance import Pruned, PrunedMatrix
from dataclasses import dataclass
from pathlib import Path

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import PruningError
from sparsepack.models.pattern import LARGEST_GROUP
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


def pruned_table(pruned: "Pruned") -> str:
    """What was pruned: a row per block, of each site the error of its outputs, and what was asked."""
    blocks: dict[str, dict[str, list[PrunedMatrix]]] = {}
    for row in pruned.matrices:
        _, layer, site = row.site.split(".")
        blocks.setdefault(layer, {}).setdefault(site, []).append(row)
    sites = list(dict.fromkeys(site for block in blocks.values() for site in block))
    body = [[layer, *(_pruned_cell(block.get(site, [])) for site in sites)] for layer, block in blocks.items()]
    options = pruned.options
    patterns = dict.fromkeys(f"keep {row.keep} of {row.of}" for row in pruned.matrices)
    tails = {row.tail for row in pruned.matrices if row.tail}
    more = f"; last groups of {', '.join(map(str, sorted(tails)))} inputs hold as many" if tails else ""
    density = sum(row.density for row in pruned.matrices) / max(len(pruned.matrices), 1)
    return (
        f"{markdown(Table(['block', *sites], body))}\n\nrelative error of the outputs; * inputs in another order\n"
        f"{', '.join(patterns)}, by {options['method']}: of the weights of {len(pruned.matrices)} matrices "
        f"{100 * density:.1f} % are not zero{more}"
    )


def _pruned_cell(rows: "Sequence[PrunedMatrix]") -> str:
    """The largest error of a site's matrices."""
    if not rows:
        return "-"
    return f"{max(row.error for row in rows):.3f}{'*' if any(row.permuted for row in rows) else ''}"


PRUNE = Operation(
    name="prune",
    summary="Set a fixed share of the weights of every group to zero.",
    help="""
Prune the matrices of MODEL: of every OF consecutive inputs of a row, KEEP nonzero weights stay.

The result is an ordinary checkpoint in the model's own type; embedding and output matrix stay as they are. One
decoder block is in memory at a time. A run that was killed goes on where it stopped when the same command is given
again. With --devices, or under torchrun, several workers share the windows; the result has the same bytes.
""",
    options=PruneOptions,
    inputs={
        "calibration": Input(
            "A folder made by `sparsepack calibrate`, whose text is run; magnitude takes none.",
            before="permute",
            counts=(_READS_TEXT,),
        )
    },
    run="sparsepack.calibrate.pruning:prune",
    forecast="sparsepack.calibrate.pruning:forecast",
    check=PruneOptions.check_calibration,
    table=lambda made, output: pruned_table(made),
    output="The checkpoint to make, a folder.",
)

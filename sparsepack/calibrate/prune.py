"""`prune`: its options, what it declares, and what was pruned as text for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import PruningError
from sparsepack.models.pattern import LARGEST_GROUP
from sparsepack.operation import Cost, Input, Operation
from sparsepack.option import check_options, only_with, option
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Provenance, Pruned, PrunedMatrix

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

    @property
    def reads_text(self) -> bool:
        """Whether the method must know what enters the matrices."""
        return self.method != METHODS[0]

    def check_calibration(self, calibration: Path | None) -> None:
        """Raise `PruningError` where the method needs a calibration and there is none, or reads none and there is."""
        if not self.reads_text and calibration is not None:
            raise PruningError(f"calibration {calibration}: method {self.method} reads no text; leave it out")
        if self.reads_text and calibration is None:
            raise PruningError(f"method {self.method}: it needs the inputs of the matrices; give --calibration")

    def check(self) -> None:
        """Raise `PruningError` for values that make no sense."""
        check_options(self, PruningError)
        for keep, of, where in ((self.keep, self.of, ""), *((s.keep, s.of, f"{s.site}: ") for s in self.sites)):
            if not 1 <= keep <= of or not 2 <= of <= LARGEST_GROUP or (keep == of and not where):
                raise PruningError(f"{where}keep {keep} of {of}: expected 1 <= keep < of <= {LARGEST_GROUP}")


def cost(checkpoint: "Checkpoint", options: PruneOptions, windows: tuple[int, int]) -> Cost:
    """Each block is run twice: as it is, and pruned. In memory are the text's way through a block while its inputs are
    counted, or what its matrices are pruned with."""
    from sparsepack.calibrate.permute import AT_ONCE, SAMPLED_ROWS
    from sparsepack.calibrate.sparsegpt import METHODS as METHODS_BY_NAME
    from sparsepack.files.tensors import arithmetic
    from sparsepack.models.hf_model.forecast import LIVE, block_by_block_bytes, block_parameters

    shapes = [checkpoint.stacked_shape(site) for site in checkpoint.family.projections_of(0)]
    by_products = METHODS_BY_NAME[options.method].needs == "products"
    products = [4 * columns**2 for _, columns in shapes] if by_products else [0]
    count, context = (min(options.windows, windows[0]), windows[1]) if options.reads_text else (0, 0)
    size = arithmetic(options.dtype, checkpoint.dtype, options.device).itemsize
    way = block_by_block_bytes(checkpoint, size, (count, context), options.batch)
    way += 2 * sum(products)  # of all windows and of a batch
    hidden = count * context * int(checkpoint.config.hidden_size) * size
    block = block_parameters(checkpoint) * (size + 2 * checkpoint.dtype.itemsize)
    matrix = 4 * LIVE * max(rows * columns for rows, columns in shapes)
    # Sums, means and factors of each site; of one its inverse on the way, and another order of both.
    inputs = 3 * sum(products) + (5 if options.permute else 3) * max(products)
    swaps = max(min(AT_ONCE, columns * options.of * min(rows, SAMPLED_ROWS)) for rows, columns in shapes)
    matrices = hidden + block + inputs + matrix + (2 * 4 * swaps if options.permute else 0)
    return Cost(2 * count * context, max(way, matrices))


def predict(checkpoint: "Checkpoint", options: PruneOptions) -> tuple["Checkpoint", "Provenance"]:
    """A model like the one that is pruned, and the record of the pruned one."""
    from sparsepack.calibrate.pruning import site_patterns
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.models.provenance import Provenance

    patterns = {
        f"{checkpoint.family.block(layer)}.{projection}": pattern
        for (layer, site), pattern in site_patterns(checkpoint, options).items()
        for projection in checkpoint.family_at(layer).projections_of(layer)[site]
    }
    how = {"method": options.method, "permute": options.permute}
    source = {"model": checkpoint.name, "model_sha256": checkpoint.sha256}
    digest = NO_HASH if options.reads_text else None
    return checkpoint, Provenance({**how, **source, "calibration_sha256": digest}, patterns)


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
    cost=cost,
    predict=predict,
    check=PruneOptions.check_calibration,
    table=lambda made, output: pruned_table(made),
    output="The checkpoint to make, a folder.",
)

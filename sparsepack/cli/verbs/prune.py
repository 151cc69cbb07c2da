"""`sparsepack prune`, and what came of it as text for people."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsepack.calibrate.prune import PruneOptions, SitePattern
from sparsepack.cli.command import OUTPUT, PATH, Ruled, from_options, group, options_from, overwrite_flag, verb
from sparsepack.cli.shared import CALIBRATION, compute, devices_option, dry_run_option, tell_forecast, workers_of
from sparsepack.option import options_of
from sparsepack.tables import Table, markdown
from sparsepack.terminal import tell

if TYPE_CHECKING:
    from sparsepack.models.records.pruned import Pruned, PrunedMatrix


@verb(short_help="Set a fixed share of the weights of every group to zero.")
@click.argument("model")
@from_options(PruneOptions, "--keep", required=True)
@from_options(PruneOptions, "--of", required=True)
@from_options(PruneOptions, "--method")
@click.option(
    "--calibration",
    cls=Ruled,
    type=CALIBRATION,
    help="A folder made by `sparsepack calibrate`, whose text is run; magnitude takes none.",
    counts=options_of(PruneOptions)["windows"].counts,
)
@options_from(PruneOptions, "--permute", "--include", "--ignore")
@from_options(PruneOptions, "--site", "sites", nargs=3, type=(str, int, int), multiple=True, metavar="SITE KEEP OF")
@options_from(PruneOptions, "--windows", "--damping", "--batch")
@group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help="The checkpoint to make, a folder."))
@compute
@devices_option
@dry_run_option
@overwrite_flag
def prune(
    model: str,
    output: Path,
    calibration: Path | None,
    sites: tuple[tuple[str, int, int], ...],
    overwrite: bool,
    dry_run: int | None,
    **asked: Any,
) -> None:
    """Prune the matrices of MODEL: of every OF consecutive inputs of a row, KEEP nonzero weights stay.

    The result is an ordinary checkpoint in the model's own type; embedding and output matrix stay as they are. One
    decoder block is in memory at a time. A run that was killed goes on where it stopped when the same command is given
    again. With --devices, or under torchrun, several workers share the windows; the result has the same bytes.
    """
    patterns = tuple(SitePattern(*site) for site in sites)
    options = PruneOptions(**asked, sites=patterns)
    options.check()
    options.check_calibration(calibration)
    if dry_run is not None:
        from sparsepack.calibrate.pruning import forecast

        tell_forecast(partial(forecast, model, options, calibration), dry_run)
        return
    from sparsepack.calibrate.pruning import prune as run

    with workers_of(asked) as workers:
        made = run(model, output, PruneOptions(**asked, sites=patterns), calibration, overwrite, workers)
        if not workers.first:
            return
    tell(pruned_table(made))


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

"""`sparsepack prune`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options.declared import PATH, from_options, options_from
from sparsepack.cli.options.output import OUTPUT, overwrite_flag
from sparsepack.cli.options.shared import CALIBRATION, compute
from sparsepack.cli.options.verb import Ruled, group, verb
from sparsepack.cli.options.workers import devices_option, dry_run_option, tell_forecast, workers_of
from sparsepack.option import options_of
from sparsepack.pruning.options import PruneOptions, SitePattern
from sparsepack.terminal import tell


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
        from sparsepack.pruning.forecast import forecast

        tell_forecast(partial(forecast, model, options, calibration), dry_run)
        return
    from sparsepack.cli.tables.pruned import pruned_table
    from sparsepack.pruning.run import prune as run

    with workers_of(asked) as workers:
        made = run(model, output, PruneOptions(**asked, sites=patterns), calibration, overwrite, workers)
        if not workers.first:
            return
    tell(pruned_table(made))

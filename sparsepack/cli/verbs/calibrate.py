"""`sparsepack calibrate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.cli.options.declared import options_from
from sparsepack.cli.options.merging import merges, over_texts
from sparsepack.cli.options.output import overwrite_flag
from sparsepack.cli.options.shared import compute
from sparsepack.cli.options.verb import verb
from sparsepack.cli.options.workers import devices_option, workers_of
from sparsepack.errors import UserError
from sparsepack.terminal import tell
from sparsepack.workers.environment import several


@verb(short_help="Collect the statistics of a model over text.")
@over_texts("The calibration folder to make.")
@options_from(CalibrateOptions, "--context", "--samples", "--seed", "--sinks", "--batch")
@compute
@devices_option
@click.option(
    "--dry-run",
    "dry_run",
    type=click.IntRange(1),
    metavar="N",
    help="Write nothing: say what it would take N workers like this process, from one measured block (default: run).",
)
@overwrite_flag
def calibrate(
    model: str,
    folders: tuple[Path, ...],
    texts: tuple[str, ...],
    output: Path,
    overwrite: bool,
    dry_run: int | None,
    **asked: Any,
) -> None:
    """Collect the statistics of MODEL over text; or `calibrate merge A B -o C` of two calibrations of one model.

    One pass, one decoder block at work while the next one is read. A run that was killed goes on from what it saved
    last when the same command is given again. With --devices, or under torchrun, several workers share the windows; the
    calibration has the same bytes.
    """
    CalibrateOptions(**asked).check()
    from sparsepack.cli.tables.manifests import calibration_table

    if merges("calibrate", "calibration folders", model, folders, texts):
        from sparsepack.calibration.folder import merge_folders

        made = merge_folders(folders[0], folders[1], output, overwrite)
    elif dry_run is not None:
        if several():
            raise UserError("--dry-run: it measures in one process; leave --devices and torchrun out")
        from sparsepack.calibration.forecast import forecast
        from sparsepack.cli.tables.forecast import forecast_table

        tell(forecast_table(forecast(model, texts, CalibrateOptions(**asked), dry_run)))
        return
    else:
        from sparsepack.calibration.run import calibrate as run_calibration

        with workers_of(asked) as workers:
            made = run_calibration(model, texts, output, CalibrateOptions(**asked), overwrite, workers)
            if not workers.first:
                return
    tell(calibration_table(made.manifest))

"""`sparsepack calibrate`."""

from functools import partial
from pathlib import Path
from typing import Any

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.cli.command import options_from, overwrite_flag, verb
from sparsepack.cli.shared import compute, devices_option, dry_run_option, merges, over_texts, tell_forecast, workers_of
from sparsepack.terminal import tell


@verb(short_help="Collect the statistics of a model over text.")
@over_texts("The calibration folder to make.")
@options_from(CalibrateOptions, "--context", "--samples", "--held-out", "--seed", "--sinks", "--batch")
@compute
@devices_option
@dry_run_option
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
    from sparsepack.cli.tables import calibration_table

    if merges("calibrate", "calibration folders", model, folders, texts):
        from sparsepack.calibrate.folder import merge_folders

        made = merge_folders(folders[0], folders[1], output, overwrite)
    elif dry_run is not None:
        from sparsepack.calibrate.collection import forecast

        tell_forecast(partial(forecast, model, texts, CalibrateOptions(**asked)), dry_run)
        return
    else:
        from sparsepack.calibrate.collection import calibrate as run_calibration

        with workers_of(asked) as workers:
            made = run_calibration(model, texts, output, CalibrateOptions(**asked), overwrite, workers)
            if not workers.first:
                return
    tell(calibration_table(made.manifest))

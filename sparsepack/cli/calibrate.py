"""`sparsepack calibrate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.cli.options import PATH, compute, from_options, overwrite_flag


@click.command()
@click.argument("model")
@click.argument("folders", nargs=-1, type=PATH)
@click.option("--text", "texts", multiple=True, help="What to run; repeats.")
@click.option("-o", "--output", type=PATH, required=True, help="The calibration folder to make.")
@from_options(CalibrateOptions, "--context")
@from_options(CalibrateOptions, "--samples")
@from_options(CalibrateOptions, "--seed")
@from_options(CalibrateOptions, "--sinks")
@from_options(CalibrateOptions, "--batch")
@compute
@overwrite_flag
def calibrate(
    model: str, folders: tuple[Path, ...], texts: tuple[str, ...], output: Path, overwrite: bool, **asked: Any
) -> None:
    """Collect the statistics of MODEL over text; or `calibrate merge A B -o C` of two calibrations of one model.

    One pass, one decoder block in memory at a time. A run that was killed goes on where it stopped when the same
    command is given again.
    """
    from sparsepack.cli.tables import calibration_table

    if model == "merge":
        from sparsepack.calibration.folder import merge_folders

        if len(folders) != 2 or texts:
            raise click.UsageError("merge takes two calibration folders and -o: sparsepack calibrate merge A B -o C")
        made = merge_folders(folders[0], folders[1], output, overwrite)
    else:
        from sparsepack.calibration.run import calibrate as run_calibration

        if folders or not texts:
            raise click.UsageError("give one MODEL and --text: sparsepack calibrate MODEL --text FILE -o FOLDER")
        options = CalibrateOptions(**asked)
        made = run_calibration(model, texts, output, options, overwrite)
    click.echo(calibration_table(made.manifest))

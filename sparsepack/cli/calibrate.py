"""`sparsepack calibrate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.options import CalibrateOptions
from sparsepack.cli.options import PATH, compute, from_options, overwrite_flag, seed_option, window


@click.command()
@click.argument("model")
@click.argument("folders", nargs=-1, type=PATH)
@click.option("--text", "texts", multiple=True, help="What to run; repeats.")
@click.option("-o", "--output", type=PATH, required=True, help="The calibration folder to make.")
@window
@from_options(
    CalibrateOptions,
    "--samples",
    type=click.IntRange(0),
    help="Windows drawn at random (of a text beyond 8 million characters, from stretches of it that are drawn first); "
    "0 for all, in order.",
)
@seed_option
@from_options(
    CalibrateOptions,
    "--sinks",
    type=click.IntRange(0),
    help="First positions of a window left out of the statistics.",
)
@from_options(CalibrateOptions, "--batch", type=click.IntRange(1), help="Windows at a time.")
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
        from sparsepack.calibrate.folder import merge_folders

        if len(folders) != 2 or texts:
            raise click.UsageError("merge takes two calibration folders and -o: sparsepack calibrate merge A B -o C")
        made = merge_folders(folders[0], folders[1], output, overwrite)
    else:
        from sparsepack.calibrate.run import calibrate as run_calibration
        from sparsepack.files.text import read_text
        from sparsepack.models.checkpoint import open_checkpoint

        if folders or not texts:
            raise click.UsageError("give one MODEL and --text: sparsepack calibrate MODEL --text FILE -o FOLDER")
        options = CalibrateOptions(**asked)
        made = run_calibration(open_checkpoint(model), read_text(texts), output, options, overwrite)
    click.echo(calibration_table(made.manifest))

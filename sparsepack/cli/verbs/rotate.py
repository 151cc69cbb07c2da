"""`sparsepack rotate`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options.declared import PATH, options_from
from sparsepack.cli.options.output import OUTPUT, overwrite_flag
from sparsepack.cli.options.shared import CALIBRATION, device_option
from sparsepack.cli.options.verb import group, verb
from sparsepack.cli.options.workers import devices_option, dry_run_option, tell_forecast, workers_of
from sparsepack.rotation.options import RotateOptions
from sparsepack.terminal import tell


@verb(short_help="Write a model in coordinates in which skipping loses less.")
@click.argument("model")
@click.option(
    "--calibration",
    type=CALIBRATION,
    required=True,
    help="A folder made by `sparsepack calibrate` of MODEL, for its statistics and its text.",
)
@options_from(RotateOptions, "--basis", "--segments", "--seed", "--weights")
@group("A learnt basis", options_from(RotateOptions, "--sparsity", "--steps", "--batch", "--length", "--rate"))
@group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help="The checkpoint to make, a folder."))
@device_option
@devices_option
@dry_run_option
@overwrite_flag
def rotate(model: str, calibration: Path, output: Path, overwrite: bool, dry_run: int | None, **asked: Any) -> None:
    """Write MODEL with its residual stream in another basis: the same function, folded into the weights.

    The result is an ordinary checkpoint, or with several segments one that sparsepack alone takes; calibrate that one
    for what follows. Its logits are compared with those of MODEL, and nothing is written where they differ. One decoder
    block is in memory at a time; a learnt basis needs the whole model there, and is for a GPU. A run that was killed
    goes on where it stopped when the same command is given again. With --devices, or under torchrun, several workers
    share the blocks, and the windows on which a basis is learnt; the result has the same bytes.
    """
    RotateOptions(**asked).check()
    if dry_run is not None:
        from sparsepack.rotation.forecast import forecast

        tell_forecast(partial(forecast, model, calibration, RotateOptions(**asked)), dry_run)
        return
    from sparsepack.cli.tables.rotated import rotated_text
    from sparsepack.rotation.run import rotate as run

    with workers_of(asked) as workers:
        made = run(model, calibration, output, RotateOptions(**asked), overwrite, workers)
        if not workers.first:
            return
    tell(rotated_text(made, output))

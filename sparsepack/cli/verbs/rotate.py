"""`sparsepack rotate`, and what came of it as text for people."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.cli.command import OUTPUT, PATH, group, options_from, overwrite_flag, verb
from sparsepack.cli.shared import CALIBRATION, device_option, devices_option, dry_run_option, tell_forecast, workers_of
from sparsepack.terminal import tell

if TYPE_CHECKING:
    from sparsepack.models.records.rotated import Rotated


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
        from sparsepack.calibrate.rotation import forecast

        tell_forecast(partial(forecast, model, calibration, RotateOptions(**asked)), dry_run)
        return
    from sparsepack.calibrate.rotation import rotate as run

    with workers_of(asked) as workers:
        made = run(model, calibration, output, RotateOptions(**asked), overwrite, workers)
        if not workers.first:
            return
    tell(rotated_text(made, output))


def rotated_text(made: "Rotated", output: Path) -> str:
    """What was rotated, how far its logits are from the model's, and what it costs."""
    from sparsepack.models.records.rotated import basis_in_words

    into = basis_in_words(made.options["basis"], made.boundaries)
    lines = [
        f"{output}: {made.model} in {into}; over {made.tokens:,} tokens its logits differ by {made.error:.1e} of their "
        "size",
        *(f"note: {note}" for note in made.notes),
    ]
    return "\n".join(lines)

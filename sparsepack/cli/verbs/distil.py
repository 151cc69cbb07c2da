"""`sparsepack distil`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options.declared import PATH, options_from
from sparsepack.cli.options.output import OUTPUT, overwrite_flag
from sparsepack.cli.options.shared import CALIBRATION, compute
from sparsepack.cli.options.verb import group, verb
from sparsepack.distillation.options import DistilOptions
from sparsepack.terminal import tell


@verb(short_help="Train weights so that skipping or pruning loses less.")
@click.argument("model")
@click.option(
    "--calibration",
    type=CALIBRATION,
    required=True,
    help="A folder made by `sparsepack calibrate` of MODEL, on whose text it is trained; where nothing is skipped, "
    "one of its teacher will do.",
)
@click.option(
    "--teacher",
    metavar="MODEL",
    help="The model that MODEL was pruned from (default: the one that its record names, if it is still there).",
)
@options_from(DistilOptions, "--sparsity", "--offsets", "--weights")
@group(
    "Training",
    options_from(DistilOptions, "--rank", "--rate", "--prompt", "--steps", "--batch", "--length", "--seed"),
)
@group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help="The checkpoint to make, a folder."))
@compute
@overwrite_flag
def distil(model: str, calibration: Path, teacher: str | None, output: Path, overwrite: bool, **asked: Any) -> None:
    """Train the weights of MODEL to say, with channels skipped, what MODEL says with all of them. The weights that stay
    in a pruned MODEL learn to say what the model from before says, whether channels are skipped or not; its zeros stay.

    The result is an ordinary checkpoint; calibrate that one for what follows. Thresholds are trained along and let go:
    `pack --allocation global` learns them on the result. The whole model is on one device, and a GPU is wanted. At the
    end MODEL and the result are compared with what they learn from, on the calibration's text. A run that was killed
    goes on from the step that was kept last when the same command is given again.
    """
    options = DistilOptions(**asked)
    options.check()
    from sparsepack.cli.tables.distilled import distilled_text
    from sparsepack.distillation.run import distil as run

    tell(distilled_text(run(model, calibration, output, options, overwrite, teacher), output))

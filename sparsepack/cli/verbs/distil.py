"""`sparsepack distil`, and what came of it as text for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsepack.calibrate.distil import DistilOptions
from sparsepack.cli.command import OUTPUT, PATH, group, options_from, overwrite_flag, verb
from sparsepack.cli.shared import CALIBRATION, compute
from sparsepack.tables import Table, markdown
from sparsepack.terminal import tell

if TYPE_CHECKING:
    from sparsepack.models.records.distilled import Distilled, Figures


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
    from sparsepack.calibrate.distillation import distil as run

    tell(distilled_text(run(model, calibration, output, options, overwrite, teacher), output))


def distilled_text(made: "Distilled", output: Path) -> str:
    """What was trained, and how far the result is from the model, before and after."""
    from sparsepack.models.records.distilled import trained_in_words

    sparsity = made.options["sparsity"]
    trained = trained_in_words(made.options["rank"], made.teacher is not None)
    largest = max(made.changes, key=lambda name: made.changes[name])
    return markdown(
        f"{output}: {trained} of {len(made.changes)} matrices of {made.model}, trained"
        f"{f' for {100 * sparsity:.3g} % skipped' if sparsity else ''}, stored in {made.weights}",
        _table(made, ", uniform thresholds", ", those trained along") if sparsity else _table(made),
        f"over {made.tokens:,} tokens of the calibration; matrices changed by {100 * made.changes[largest]:.2g} % of "
        f"their size at most ({largest})",
    )


def _table(made: "Distilled", first: str = "", last: str = "") -> Table:
    """How far both are from the teacher."""
    rows = [_row(f"before{first}", made.before), _row(f"after{last}", made.after)]
    return Table([f"KL divergence from {made.teacher or made.model}", "decoded", "dense, prompts", "skipped"], rows)


def _row(when: str, figures: "Figures") -> list[str]:
    return [when, f"{figures.sparse:.4f}", f"{figures.prompt:.4f}", f"{100 * figures.skipped:.1f} %"]

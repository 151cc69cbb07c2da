"""`sparsepack place`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options.declared import from_options, options_from
from sparsepack.cli.options.output import emit, json_output
from sparsepack.cli.options.shared import ARTIFACT, CALIBRATION, usable_device
from sparsepack.cli.options.verb import verb
from sparsepack.placement.options import PlaceOptions


@verb(short_help="Say what of a model lies on a card, and what in host memory.")
@click.argument("path", type=ARTIFACT)
@from_options(PlaceOptions, "--vram", required=True)
@options_from(PlaceOptions, "--context", "--gate-copy")
@click.option(
    "--calibration",
    type=CALIBRATION,
    help="Of a file with experts: a folder made by `sparsepack calibrate` or `sparsepack trace`, which says how often "
    "each is used.",
)
@from_options(PlaceOptions, "--device", callback=usable_device)
@from_options(PlaceOptions, "--machine")
@json_output
def place(path: Path, calibration: Path | None, json_path: str | None, **asked: Any) -> None:
    """Say what of a file lies in the GPU's memory and what in the host's, within a budget.

    Shown are bytes, and the tokens per second that a model of time expects; of files of the format neuron-q4_k also the
    slots of each block, and how much of what a token needs has a slot. Nothing is written, and no GPU is needed;
    `generate --vram` loads the model so. Of a model with experts slots are for these; no engine loads it so yet.
    """
    options = PlaceOptions(**asked)
    from sparsepack.cli.tables.placement import placement_table
    from sparsepack.placing import place as plan

    emit(plan(path, options, calibration), json_path, placement_table)

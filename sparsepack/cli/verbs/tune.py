"""`sparsepack tune`."""

from pathlib import Path

import click

from sparsepack.cli.options.declared import from_options
from sparsepack.cli.options.output import emit, json_output
from sparsepack.cli.options.shared import ARTIFACT, RUNS, device_option
from sparsepack.cli.options.verb import group, verb
from sparsepack.option import only_with
from sparsepack.runtime.options import EngineOptions


@verb(short_help="Find the fastest layout of the kernels on this machine.")
@click.argument("paths", type=ARTIFACT, nargs=-1)
@device_option
@group(RUNS, from_options(EngineOptions, "--threads", counts=(only_with("device", "cpu"),)))
@json_output
def tune(paths: tuple[Path, ...], device: str, threads: int | None, json_path: str | None) -> None:
    """Measure once which layout suits this machine, for the matrices of the zigzag artifacts PATHS.

    Without PATHS: for those of Llamas of 1 and 8 billion parameters. What was found is kept below ~/.cache, and the
    runtime of the device uses it from then on (on the CPU at the same number of threads); output changes by rounding
    only. Of artifacts by neurons it also measures what neurons are divided by where only some have slots: on a GPU with
    the processor beside it, and figures that other work hides are refused. Nothing else should run meanwhile.
    """
    from sparsepack.cli.tables.tuning import tuning_table
    from sparsepack.tuning import tune as measure

    emit(measure(paths, device, threads), json_path, tuning_table)

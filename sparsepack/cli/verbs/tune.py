"""`sparsepack tune`."""

from pathlib import Path

import click

from sparsepack.cli.options.declared import from_options
from sparsepack.cli.options.output import emit, json_output
from sparsepack.cli.options.shared import ARTIFACT, RUNS, device_option
from sparsepack.cli.options.verb import group, verb
from sparsepack.runtime.options import EngineOptions


@verb(short_help="Find the fastest layout of the kernels on this machine.")
@click.argument("paths", type=ARTIFACT, nargs=-1)
@device_option
@group(RUNS, from_options(EngineOptions, "--threads"))
@json_output
def tune(paths: tuple[Path, ...], device: str, threads: int | None, json_path: str | None) -> None:
    """Measure once which layout suits this machine, for the matrices of the artifacts PATHS.

    Without PATHS: for those of Llamas of 1 and 8 billion parameters. What was found is kept below ~/.cache, and the
    runtime of the device uses it from then on (on the CPU at the same number of threads); output changes by rounding
    only. Of artifacts by neurons it also measures the speeds by which neurons are divided where only some have slots
    (--cached, --vram): on a CPU of two halves of its threads, on a GPU of the GPU's memory, of the bus, and of the
    processor, of which --threads then says the threads; of other artifacts on a GPU likewise, for matrices that have no
    room there. Nothing else should run meanwhile; where other work hides the
    figures beside a GPU in three attempts, they are refused and not kept.
    """
    from sparsepack.cli.tables.tuning import tuning_table
    from sparsepack.tuning import tune as measure

    emit(measure(paths, device, threads), json_path, tuning_table)

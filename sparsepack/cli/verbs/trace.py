"""`sparsepack trace`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.trace import TraceOptions
from sparsepack.cli.command import from_options, options_from, overwrite_flag, verb
from sparsepack.cli.shared import CALIBRATION, compute, merges, over_texts
from sparsepack.terminal import tell


@verb(short_help="Record which neurons are active for each token.")
@over_texts("The folder to make.")
@options_from(TraceOptions, "--sessions", "--tokens", "--prompt", "--share")
@click.option(
    "--calibration", type=CALIBRATION, help="A folder made by `sparsepack calibrate`, for the thresholds of --share."
)
@from_options(TraceOptions, "--batch")
@compute
@overwrite_flag
def trace(
    model: str,
    folders: tuple[Path, ...],
    texts: tuple[str, ...],
    output: Path,
    calibration: Path | None,
    overwrite: bool,
    **asked: Any,
) -> None:
    """Record which neurons of MODEL are active for each token; or `trace merge A B -o C` of two traces of one model.

    A neuron is active where its activation, times what multiplies it, is not zero. Of a mixture of experts it is the
    experts that are recorded: those that the router gives a token to. `inspect` shows what a trace holds.
    A run that was killed goes on where it stopped when the same command is given again.
    """
    options = TraceOptions(**asked)
    options.check()
    from sparsepack.cli.tables import trace_table

    if merges("trace", "traces", model, folders, texts):
        from sparsepack.calibrate.trace_file import merge_folders

        made = merge_folders(folders[0], folders[1], output, overwrite)
    else:
        from sparsepack.calibrate.tracing import trace as run_trace

        made = run_trace(model, texts, output, options, calibration, overwrite)
    tell(trace_table(made.manifest))

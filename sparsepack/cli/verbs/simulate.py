"""`sparsepack simulate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options.declared import PATH, options_from
from sparsepack.cli.options.output import emit, json_output
from sparsepack.cli.options.shared import CALIBRATION
from sparsepack.cli.options.verb import Existing, verb
from sparsepack.simulation.options import SimulateOptions


def _plottable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a picture that cannot be drawn before there is anything to draw."""
    if path is not None:
        from sparsepack.simulation.plot import check_plot

        check_plot(path)
    return path


@verb(short_help="Play a trace under policies that place neurons.")
@click.argument("trace", type=Existing("a folder made by `sparsepack trace`"))
@click.option(
    "--calibration",
    type=CALIBRATION,
    required=True,
    help="A folder made by `sparsepack calibrate`: its frequencies give out the first slots. For a trace made with "
    "--share, and for --order metis, another trace of the same kind, of other text.",
)
@options_from(SimulateOptions, "--cached", "--policy", "--group", "--order", "--machine", "--shape", "--vram")
@click.option(
    "--plot",
    "plot_path",
    type=PATH,
    metavar="FILE",
    callback=_plottable,
    help="Draw hit rates and host reads into a file, .png or .svg: of the policies of --policy, else of four.",
)
@json_output
def simulate(trace: Path, calibration: Path, plot_path: Path | None, json_path: str | None, **asked: Any) -> None:
    """Play TRACE under policies that say which neurons have slots near the processor.

    A policy gives out slots for a share of the neurons and may move them after each token. Shown is how much of what
    a token needs has a slot when it is needed, and what is moved for that. With --machine, a model of a machine's
    time says how fast a larger model whose neurons behave so would decode.
    """
    options = SimulateOptions(**asked)
    options.check()
    from sparsepack.cli.tables.simulation import simulation_table
    from sparsepack.simulation.run import simulate as run_simulation

    result = run_simulation(trace, calibration, options)
    emit(result, json_path, simulation_table)
    if plot_path is not None:
        from sparsepack.simulation.plot import drawn, plot

        plot(result, plot_path, drawn(result["policies"]) if asked["policy"] is None else None)

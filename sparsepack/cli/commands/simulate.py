"""`sparsepack simulate`, and what came of it as text for people."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import PATH, Existing, command, emit, json_output, options_from
from sparsepack.cli.shared import CALIBRATION
from sparsepack.simulation.options import SimulateOptions
from sparsepack.tables import Table, markdown


def _plottable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a picture that cannot be drawn before there is anything to draw."""
    if path is not None:
        from sparsepack.simulation.plot import check_plot

        check_plot(path)
    return path


@command(short_help="Play a trace under policies that place neurons.")
@click.argument("trace", type=Existing("a folder made by `sparsepack trace`"))
@click.option(
    "--calibration",
    type=CALIBRATION,
    required=True,
    help="A folder made by `sparsepack calibrate`: its frequencies give out the first slots. For a trace made with "
    "--share, another trace of the same kind, of other text.",
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
    from sparsepack.simulation.run import simulate as run_simulation

    result = run_simulation(trace, calibration, options)
    emit(result, json_path, simulation_table)
    if plot_path is not None:
        from sparsepack.simulation.plot import drawn, plot

        plot(result, plot_path, drawn(result["policies"]) if asked["policy"] is None else None)


def simulation_table(result: Mapping[str, Any]) -> str:
    """The tables of `simulation.run.simulate`: a row for each policy, a column for each share of the neurons."""
    from sparsepack.eval.results import with_error

    policies = result["policies"]
    width = max(map(len, policies))
    group, unit = result["group"]["neurons"], result["unit"]
    units = "" if group == 1 else f", which move {group} together, grouped by {result['group']['order']}"
    parts: list[str | Table] = [
        f"{result['trace']['sessions']} sessions; a token needs {100 * result['density']:.1f} % of "
        f"{result['neurons']:,} {unit}{units}",
        "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in policies.items()),
        _titled(
            f"share of the needed {unit} that have a slot, ± standard error over sessions ({unit} moved per token)",
            result,
            lambda row: f"{with_error(row['hit_rate'], 3)} ({row['moves']:.1f})",
            _bounds(result),
        ),
        _titled(
            f"difference from {next(iter(policies))}, paired by session",
            result,
            lambda row: with_error(row["difference"], 3),
        ),
        _titled(
            f"{unit} read from host memory per token, moves included, ± standard error over sessions (share of the "
            "moves that were of no use)",
            result,
            lambda row: (
                with_error(row["host_reads"], 0) + (f" ({row['unused'] / row['moves']:.0%})" if row["moves"] else "")
            ),
        ),
    ]
    if machine := result["machine"]:
        parts.append(
            _titled(
                f"tokens per second of a {machine['shape']} model on {machine['name']}, by a model of time that is a "
                "bound: the processor reads what has no slot / the GPU helps over the bus",
                result,
                lambda row: " / ".join(f"{value:.1f}" for value in row["tokens_per_second"].values()),
                [["dense, split by weights", *(f"{value:.1f}" for value in machine["dense_split"])]],
                [
                    f"{100 * share:.3g} %, {vram / 1e9:.1f} GB"
                    for share, vram in zip(_shares(result), machine["vram"], strict=True)
                ],
            )
        )
    return markdown(*parts)


def _titled(
    title: str,
    result: Mapping[str, Any],
    cell: Callable[[Mapping[str, Any]], str],
    more: list[list[str]] | None = None,
    heads: list[str] | None = None,
) -> Table:
    shares = _shares(result)
    rows = [[name, *(cell(row) for row in result["results"] if row["policy"] == name)] for name in result["policies"]]
    columns = heads or [f"{100 * share:.3g} %" for share in shares]
    return Table(["policy", *columns], [*rows, *(more or [])], title)


def _shares(result: Mapping[str, Any]) -> list[float]:
    return list(dict.fromkeys(row["cached"] for row in result["results"]))


def _bounds(result: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table of bounds, one for each price of a move."""
    prices = dict.fromkeys(row["price"] for row in result["bounds"])
    return [
        [
            f"bound on hits - {price:g} x moves",
            *(f"{row['value']:.3f}" for row in result["bounds"] if row["price"] == price),
        ]
        for price in prices
    ]

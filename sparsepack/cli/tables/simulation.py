"""What a simulation of placements found, as text for people."""

from collections.abc import Callable, Mapping
from typing import Any

from sparsepack.eval.standard_error import with_error
from sparsepack.tables import Table, markdown


def simulation_table(result: Mapping[str, Any]) -> str:
    """The tables of `simulation.run.simulate`: a row for each policy, a column for each share of the neurons."""
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

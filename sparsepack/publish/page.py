"""The report of a recipe's run as one page of HTML that needs nothing else: no script, picture or font from afar."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from markupsafe import Markup

from sparsepack.bench.table import speed_table
from sparsepack.errors import UserError
from sparsepack.eval.tables import accuracy_tables, pruning_table
from sparsepack.inspection import score_rows
from sparsepack.models.records.rotated import basis_in_words
from sparsepack.publish import charts
from sparsepack.publish.gates import gates_table
from sparsepack.publish.results import REPORT, read_json
from sparsepack.publish.templates import render
from sparsepack.tables import html
from sparsepack.version import __version__

_FILE = "report.json"


def report_page(work: Path) -> str:
    """The page for the work folder of a recipe, from the `report.json` in it.

    Raises `UserError` where no run ended there, or it was another sparsepack's.
    """
    path = work / _FILE
    if not path.is_file():
        raise UserError(f"{work}: no {_FILE} in it; expected the work folder of a recipe whose run has ended")
    report = read_json(path)
    if report.get("kind") != REPORT:
        raise UserError(f"{path}: not the report of a run; expected the one that `sparsepack run` leaves in its folder")
    try:
        return _page(report)
    except (KeyError, TypeError, AttributeError, ValueError, UndefinedError) as error:
        raise UserError(f"{path}: damaged, or of another sparsepack ({error!r}); run the recipe again") from error


def _page(report: Mapping[str, Any]) -> str:
    rows = [row for evaluation in report["evaluations"] for row in evaluation["perplexity"]]
    benches = [bench for bench in (report["bench"], (report["bench"] or {}).get("with_places")) if bench]
    skipped = _skipped(rows)
    rotated, pruned, alone = report["rotate"], report["prune"], report["eval_pruned"]
    return render(
        "page.html.jinja",
        report=report,
        recipe=report["recipe"],
        pack=report["pack"],
        scored=score_rows((report["pack"] or {}).get("score")),
        accuracy=[
            *accuracy_tables(report["evaluations"]),
            *([pruning_table(report["evaluations"], alone)] if alone else []),
        ],
        rotated=rotated,
        rotated_into=basis_in_words(rotated["options"]["basis"], rotated.get("boundaries", ())) if rotated else None,
        distilled=report["distil"],
        pruned=pruned,
        patterns=Counter(f"keep {row['keep']} of {row['of']}" for row in pruned["matrices"]) if pruned else {},
        errors=_errors(pruned["matrices"]) if pruned else [],
        html=lambda table: Markup(html(table)),
        skipped_on="evaluation" if skipped else "calibration",
        sparsity=_sparsity(report["thresholds"], skipped),
        thresholds=_thresholds(report["thresholds"]),
        speed=_speed([test for bench in benches for test in bench["tests"]]),
        tests=[speed_table(bench) for bench in benches],
        commands=_commands(report),
        earlier=any(stage["status"] != "ran" for stage in report["stages"]),
        gates=gates_table(report["gates"]) if report["gates"] else None,
        stages=charts.rows(
            "seconds of each stage",
            [
                charts.Bar(stage["name"] + (", earlier" if stage["status"] != "ran" else ""), stage["seconds"])
                for stage in report["stages"]
            ],
        ),
        version=__version__,
    )


def _commands(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What to type for the same run, and for what it made, each with a few words on it."""
    found = [("this run, from the folder in which it was started", report["command"])]
    if report["artifact"]:
        file, model = shlex.quote(report["artifact"]), shlex.quote(report["recipe"]["model"])
        found.append(("whether the artifact is intact, and made from that model", f"verify {file} --against {model}"))
        if report["pack"]["runs"]:
            found += [("a chat in the terminal", f"generate {file}"), ("the same for other programs", f"serve {file}")]
    return [(what, f"sparsepack {command}") for what, command in found]


def _charts(
    title: str, sites: Mapping[str, list[charts.Bar]], highest: float | None = None
) -> list[tuple[str, Markup]]:
    """A chart for each site, with a bar for each block."""
    return [(site, charts.columns(f"{title} {site}, by block", bars, highest=highest)) for site, bars in sites.items()]


def _errors(matrices: list[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """The largest error of the matrices at each site of each block."""
    worst: dict[str, dict[str, float]] = {}
    for row in matrices:
        _, layer, site = row["site"].split(".")
        of_site = worst.setdefault(site, {})
        of_site[layer] = max(of_site.get(layer, 0.0), row["error"])
    return _charts("error at", {site: [charts.Bar(*bar) for bar in found.items()] for site, found in worst.items()})


def _skipped(rows: list[Mapping[str, Any]]) -> Mapping[str, float]:
    """The share of the channels that was skipped, by site, on the first text scored sparse; empty without one."""
    return next((row["realised_sparsity"]["sites"] for row in rows if row["realised_sparsity"]["sites"]), {})


def _sparsity(table: Mapping[str, Any] | None, skipped: Mapping[str, float]) -> list[tuple[str, Markup]]:
    """The share of each site and block in `skipped`, else that on the calibration text, and a line for the target."""

    def bar(row: Mapping[str, Any]) -> charts.Bar:
        share = skipped.get(f"blk.{row['layer']}.{row['site']}", row["realised"] or 0.0)
        return charts.Bar(str(row["layer"]), share, row["sparsity"])

    return _charts("share skipped at", _by_site(table, bar), highest=1.0)


def _thresholds(table: Mapping[str, Any] | None) -> list[tuple[str, Markup]]:
    bars = _by_site(table, lambda row: charts.Bar(str(row["layer"]), row["threshold"] or 0.0))
    return _charts("threshold at", bars)


def _by_site(
    table: Mapping[str, Any] | None, bar: Callable[[Mapping[str, Any]], charts.Bar]
) -> dict[str, list[charts.Bar]]:
    """The bars of a table's rows by their sites; none of no table."""
    sites: dict[str, list[charts.Bar]] = {}
    for row in table["rows"] if table else ():
        sites.setdefault(row["site"], []).append(bar(row))
    return sites


def _speed(tests: list[Mapping[str, Any]]) -> Markup | None:
    decode = [
        charts.Bar(f"decode, {test['mode']}", test["avg_ts"], spread=(test["min_ts"], test["max_ts"]))
        for test in tests
        if test["n_gen"]
    ]
    return charts.rows("tokens a second while decoding", decode) if decode else None

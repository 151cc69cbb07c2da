"""The report of a recipe's run as one page of HTML with bars and gates; it loads no script, picture or font."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from markupsafe import Markup

from sparsepack.bench.run import speed_table
from sparsepack.errors import UserError
from sparsepack.eval.results import accuracy_tables, pruning_table
from sparsepack.inspection import score_rows
from sparsepack.models.provenance import basis_in_words
from sparsepack.publish.card import REPORT, read_json, render
from sparsepack.tables import Styled, Table, html
from sparsepack.version import __version__


def readable(value: float) -> str:
    """A measured value or a limit as text: sizes in full, all else to six digits."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"


def gates_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """Verdicts as a report has them."""
    rows = [
        [
            verdict["gate"],
            "not measured" if verdict["measured"] is None else readable(verdict["measured"]),
            verdict["limit"],
            verdict["where"],
            Styled("pass", "good") if verdict["passed"] else Styled("FAIL", "bad"),
        ]
        for verdict in verdicts
    ]
    return Table(["gate", "measured", "limit", "on", "verdict"], rows)


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 130, 38, 18, 8


@dataclass(frozen=True)
class Bar:
    """A value with its label; `mark`, a line across it: what was aimed at; `spread`: the least and the greatest."""

    label: str
    value: float
    mark: float | None = None
    spread: tuple[float, float] | None = None


def column_chart(title: str, bars: Sequence[Bar], highest: float | None = None, form: str = "{:.3g}") -> Markup:
    """One upright bar each, for as many as there are blocks in a model.

    highest -- the value at the top (default: the largest); form -- how values are written
    """
    top = highest or max((max(bar.value, bar.mark or 0) for bar in bars), default=0) or 1.0
    plot = _HEIGHT - _TOP - _BOTTOM
    step = (_WIDTH - _LEFT) / max(len(bars), 1)
    wide = min(step * 0.8, 26)
    parts = [_axis(top * share, _TOP + plot * (1 - share), form) for share in (0, 0.5, 1)]
    every = -(-len(bars) * 22 // (_WIDTH - _LEFT)) or 1  # labels are at most 22 wide
    for n, bar in enumerate(bars):
        x, tall = _LEFT + step * n + (step - wide) / 2, plot * min(bar.value / top, 1)
        said = f"{bar.label}: {form.format(bar.value)}"
        if bar.mark is not None:
            said += f", target {form.format(bar.mark)}"
        parts.append(
            Markup(
                '<g><title>{}</title><rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
            ).format(said, x, _TOP + plot - tall, wide, tall)
        )
        if bar.mark is not None:
            y = _TOP + plot * (1 - min(bar.mark / top, 1))
            parts.append(
                Markup('<line class="mark" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    x - 1, x + wide + 1, y, y
                )
            )
        parts.append(Markup("</g>"))
        if n % every == 0:
            parts.append(_text(x + wide / 2, _HEIGHT - 4, bar.label, "middle"))
    return _svg(title, _WIDTH, _HEIGHT, parts)


def row_chart(title: str, bars: Sequence[Bar], form: str = "{:,.1f}") -> Markup:
    """One lying bar each with its label before and its value behind, for a few; its spread is a line across its end."""
    top = max((value for bar in bars for value in (bar.value, *(bar.spread or ()))), default=0) or 1.0
    parts = []
    for bar in bars:
        line, said = Markup(""), form.format(bar.value)
        if bar.spread is not None:
            low, high = bar.spread
            line = Markup('<i class="spread" style="left:{:.2f}%;width:{:.2f}%"></i>').format(
                100 * low / top, 100 * (high - low) / top
            )
            said += f" ({form.format(low)} to {form.format(high)})"
        parts.append(
            Markup(
                '<span>{}</span><span class="track"><i class="bar" style="width:{:.2f}%"></i>{}</span>'
                '<span class="n">{}</span>'
            ).format(bar.label, 100 * bar.value / top, line, said)
        )
    return Markup('<div class="bars" role="group" aria-label="{}">{}</div>').format(title, Markup("").join(parts))


def _svg(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">').format(title, width, height)
    return head + Markup("").join(parts) + Markup("</svg>")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _axis(value: float, y: float, form: str) -> Markup:
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(_LEFT, _WIDTH, y, y)
    return line + _text(_LEFT - 5, y + 4, form.format(value), "end")


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
    # The share of the channels that was skipped, by site, on the first text scored sparse; empty without one.
    skipped: Mapping[str, float] = next(
        (row["realised_sparsity"]["sites"] for row in rows if row["realised_sparsity"]["sites"]), {}
    )
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
        stages=row_chart(
            "seconds of each stage",
            [
                Bar(stage["name"] + (", earlier" if stage["status"] != "ran" else ""), stage["seconds"])
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


def _charts(title: str, sites: Mapping[str, list[Bar]], highest: float | None = None) -> list[tuple[str, Markup]]:
    """A chart for each site, with a bar for each block."""
    return [(site, column_chart(f"{title} {site}, by block", bars, highest=highest)) for site, bars in sites.items()]


def _errors(matrices: list[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """The largest error of the matrices at each site of each block."""
    worst: dict[str, dict[str, float]] = {}
    for row in matrices:
        _, layer, site = row["site"].split(".")
        of_site = worst.setdefault(site, {})
        of_site[layer] = max(of_site.get(layer, 0.0), row["error"])
    return _charts("error at", {site: [Bar(*bar) for bar in found.items()] for site, found in worst.items()})


def _sparsity(table: Mapping[str, Any] | None, skipped: Mapping[str, float]) -> list[tuple[str, Markup]]:
    """The share of each site and block in `skipped`, else that on the calibration text, and a line for the target."""

    def bar(row: Mapping[str, Any]) -> Bar:
        share = skipped.get(f"blk.{row['layer']}.{row['site']}", row["realised"] or 0.0)
        return Bar(str(row["layer"]), share, row["sparsity"])

    return _charts("share skipped at", _by_site(table, bar), highest=1.0)


def _thresholds(table: Mapping[str, Any] | None) -> list[tuple[str, Markup]]:
    bars = _by_site(table, lambda row: Bar(str(row["layer"]), row["threshold"] or 0.0))
    return _charts("threshold at", bars)


def _by_site(table: Mapping[str, Any] | None, bar: Callable[[Mapping[str, Any]], Bar]) -> dict[str, list[Bar]]:
    """The bars of a table's rows by their sites; none of no table."""
    sites: dict[str, list[Bar]] = {}
    for row in table["rows"] if table else ():
        sites.setdefault(row["site"], []).append(bar(row))
    return sites


def _speed(tests: list[Mapping[str, Any]]) -> Markup | None:
    decode = [
        Bar(f"decode, {test['mode']}", test["avg_ts"], spread=(test["min_ts"], test["max_ts"]))
        for test in tests
        if test["n_gen"]
    ]
    return row_chart("tokens a second while decoding", decode) if decode else None

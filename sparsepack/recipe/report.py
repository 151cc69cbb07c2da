"""The end of a run: everything measured as one JSON-able value, and as tables."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sparsepack import __version__
from sparsepack.recipe import actions
from sparsepack.recipe.console import results, table, with_error
from sparsepack.recipe.gates import Verdict, readable
from sparsepack.recipe.schema import Recipe
from sparsepack.recipe.stages import Outcome

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
REPORT = "report.json"
_FILES = {
    "thresholds": (actions.THRESHOLDS, "thresholds"),
    "pack": (actions.DESCRIPTION, "pack"),
    "verify": (actions.VERIFICATION, "verify"),
    "bench": (actions.BENCHMARK, "bench"),
    "generate": (actions.GENERATED, "generate"),
}


def collect(recipe: Recipe, folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results of the stages that the recipe has; None for the others, [] for no evaluations."""
    there = {outcome.name for outcome in outcomes}
    found: dict[str, Any] = {key: None for _, key in _FILES.values()}
    for stage, (name, key) in _FILES.items():
        if stage in there:
            found[key] = json.loads((folder / name).read_text(encoding="utf-8"))
    if found["thresholds"] is not None:
        for row in found["thresholds"]["rows"]:  # the vectors stay in their file
            row |= {name: row[name] is not None for name in ("channel_weights", "offset")}
    evaluation = folder / actions.EVALUATION
    evaluations = json.loads(evaluation.read_text(encoding="utf-8"))["evaluations"] if "eval" in there else []
    return {
        "schema": SCHEMA,
        "kind": "recipe report",
        "sparsepack": __version__,
        "recipe": recipe.to_json(),
        "work": str(folder),
        "artifact": str(folder / actions.ARTIFACT) if recipe.pack is not None else None,
        "stages": [asdict(outcome) for outcome in outcomes],
        **found,
        "evaluations": evaluations,
    }


def show(report: Mapping[str, Any]) -> None:
    """Print what was measured to stdout."""
    console = results()
    recipe = report["recipe"]
    console.print(f"[bold]{escape(recipe['name'])}[/]: {escape(recipe['description'] or recipe['model'])}\n")
    rows = [row for evaluation in report["evaluations"] for row in evaluation["perplexity"]]
    if rows:
        console.print(_accuracy(rows))
    for evaluation in report["evaluations"]:
        if evaluation["tasks"]:
            console.print(_tasks(evaluation["tasks"]))
    for line in [*_file(report), *_speed(report["bench"]), *_text(report["generate"]), _seconds(report["stages"])]:
        console.print(line, soft_wrap=True)


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the gates to stdout."""
    made = table("gates", "gate", ">measured", "limit", "on", "verdict")
    for verdict in verdicts:
        measured = "not measured" if verdict.measured is None else readable(verdict.measured)
        said = "[green]pass[/]" if verdict.passed else "[red]FAIL[/]"
        made.add_row(verdict.gate, measured, verdict.limit, escape(verdict.where), said)
    results().print(made)


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> "Table":
    columns = ("text", "protocol", ">windows", ">perplexity", ">/ source", ">KL, nats", ">same top token")
    made = table("accuracy against the source model", *columns, ">sparsity (target)")
    for row in rows:
        realised = row["realised_sparsity"]
        sparse = row["protocol"] != "dense" and realised["target"]
        made.add_row(
            escape(row["text"]),
            row["protocol"],
            f"{row['windows']} x {row['context']}",
            with_error(row["perplexity"], 2),
            with_error(row["perplexity_ratio"], 4),
            with_error(row["kl_divergence"], 4),
            f"{100 * row['top_token_agreement']['value']:.1f} %",
            f"{realised['of_sparse_sites']:.3f} ({realised['target']:g})" if sparse else "dense",
        )
    return made


def _tasks(found: Mapping[str, Any]) -> "Table":
    made = table(f"tasks, protocol {found['protocol']}", "task", ">samples", "metric", ">value")
    for name, task in found["tasks"].items():
        for metric, value in task["metrics"].items():
            shown = "-" if value["value"] is None else with_error(value, 4)
            made.add_row(escape(name), str(task["samples"]), escape(metric), shown)
    return made


def _file(report: Mapping[str, Any]) -> Iterator[str]:
    pack = report["pack"]
    if pack is not None:
        bits = pack["bits_per_weight"]
        yield (
            f"file: {escape(report['artifact'])}, {pack['file_bytes']:,} bytes, {bits['file']:.3f} bits per weight "
            f"({bits['blocks']:.3f} in the blocks)"
        )


def _speed(bench: Mapping[str, Any] | None) -> Iterator[str]:
    if bench is None:
        return
    for row in bench["tests"]:
        what = "prefill" if row["n_prompt"] else "decode"
        skipped = f", {100 * row['realised_sparsity']:.1f} % skipped" if row["mode"] == "sparse" else ""
        yield (
            f"{what} of {row['n_prompt'] or row['n_gen']} tokens, {row['mode']}: "
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f} tokens/s{skipped}"
        )
    yield f"  ({escape(bench['runtime'])})"


def _text(generated: Mapping[str, Any] | None) -> Iterator[str]:
    if generated is not None:
        yield f"\n[dim]{escape(generated['prompt'])}[/]{escape(generated['text'])}\n"


def _seconds(stages: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{s['name']} {s['seconds']:.1f}{'' if s['status'] == 'ran' else ' (earlier)'}" for s in stages]
    return f"seconds: {', '.join(parts)}"

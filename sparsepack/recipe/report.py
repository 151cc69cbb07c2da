"""The end of a run: everything measured as one JSON-able value, and what each stage shows of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from sparsepack import __version__
from sparsepack.recipe.console import print_lines, results, table
from sparsepack.recipe.gates import Verdict, readable
from sparsepack.recipe.runner import Outcome
from sparsepack.recipe.stage import Job
from sparsepack.recipe.stages import STAGES
from sparsepack.recipe.stages.pack import PACK, artifact_of

SCHEMA = 1
REPORT = "report.json"


def collect(job: Job, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results of the stages that the recipe has; of the others what stands for none."""
    there = {outcome.name for outcome in outcomes}
    found = {}
    for stage in STAGES:
        if stage.result is not None:
            key, read, absent = stage.result
            found[key] = read(job.folder) if stage.name in there else absent
    return {
        "schema": SCHEMA,
        "kind": "recipe report",
        "sparsepack": __version__,
        "recipe": job.recipe.to_json(),
        "work": str(job.folder),
        "artifact": str(artifact_of(job)) if PACK.name in there else None,
        "stages": [asdict(outcome) for outcome in outcomes],
        **found,
    }


def show(report: Mapping[str, Any]) -> None:
    """Print what was measured to stdout."""
    recipe = report["recipe"]
    described = f"{recipe['description']}; model {recipe['model']}" if recipe["description"] else recipe["model"]
    results().print(f"[bold]{escape(recipe['name'])}[/]: {escape(described)}\n")
    for stage in STAGES:
        print_lines(stage.show(report))
    print_lines([_seconds(report["stages"])])


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the gates to stdout."""
    made = table("gates", "gate", ">measured", "limit", "on", "verdict")
    for verdict in verdicts:
        measured = "not measured" if verdict.measured is None else readable(verdict.measured)
        said = "[green]pass[/]" if verdict.passed else "[red]FAIL[/]"
        made.add_row(escape(verdict.gate), measured, verdict.limit, escape(verdict.where), said)
    results().print(made)


def _seconds(stages: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{s['name']} {s['seconds']:.1f}{'' if s['status'] == 'ran' else ' (earlier)'}" for s in stages]
    return f"seconds: {', '.join(parts)}"

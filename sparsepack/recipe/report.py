"""The end of a run: everything measured as one JSON-able value, and what each stage shows of it."""

import importlib.metadata
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsepack import tables
from sparsepack.process import cores
from sparsepack.publish.page import gates_table
from sparsepack.recipe.artifact_stages import PACK, artifact_of
from sparsepack.recipe.gates import Verdict
from sparsepack.recipe.run import LIBRARIES, Outcome
from sparsepack.recipe.stage import Job
from sparsepack.recipe.stages import STAGES
from sparsepack.version import __version__

SCHEMA = 1
REPORT = "report.json"


def command(path: Path, overrides: Sequence[str], work: Path | None) -> str:
    """What follows `sparsepack` on a command line that runs the recipe so."""
    sets = [part for override in overrides for part in ("--set", override)]
    return shlex.join(["run", str(path), *sets, *([] if work is None else ["--work", str(work)])])


def collect(job: Job, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The results of the stages that the recipe has; of the others what stands for none.

    command -- what `command` gave for this run
    """
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
        "command": command,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(job.recipe.device),
        "artifact": str(artifact_of(job)) if PACK.name in there else None,
        "stages": [asdict(outcome) for outcome in outcomes],
        **found,
    }


def _machine(device: str) -> dict[str, Any]:
    """The machine on which the run ended, and what ran on it."""
    import torch

    from sparsepack.runtime.backends import find_backend
    from sparsepack.runtime.cpu.machine import cpu_info
    from sparsepack.runtime.decoder import load_backend_module

    return {
        "cpu": cpu_info(),
        "cores": cores(),
        "gpu": load_backend_module(find_backend("reference")).describe(torch.device(device)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def show(report: Mapping[str, Any]) -> None:
    """Print what was measured to stdout."""
    recipe = report["recipe"]
    described = f"{recipe['description']}; model {recipe['model']}" if recipe["description"] else recipe["model"]
    tables.show([(tables.Styled(recipe["name"], "heading"), f": {described}\n")])
    for stage in STAGES:
        tables.show(stage.show(report))
    tables.show([_seconds(report["stages"])])


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the gates to stdout."""
    tables.show([replace(gates_table([asdict(verdict) for verdict in verdicts]), title="gates")])


def _seconds(stages: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{s['name']} {s['seconds']:.1f}{'' if s['status'] == 'ran' else ' (earlier)'}" for s in stages]
    return f"seconds: {', '.join(parts)}"

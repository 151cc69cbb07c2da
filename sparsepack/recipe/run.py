"""`run`: read a recipe, run its stages, show what came of it, judge its gates.

Run the stages of a recipe: what is up to date is skipped, the rest leaves its files in the work folder.
"""

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsepack.files.atomic import remove_leftovers
from sparsepack.files.hashing import sha256_bytes
from sparsepack.files.lock import remove_lock
from sparsepack.progress import activity, say
from sparsepack.recipe.gates import judge
from sparsepack.recipe.load import load_recipe, locate
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stage import Job, Stage
from sparsepack.recipe.stages import STAGES
from sparsepack.recipe.state import WorkFolder
from sparsepack.version import __version__

LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Outcome:
    """How a stage went: "ran" or "up to date", and the seconds it took, now or back then; those of this process's
    processors are known of stages that ran now."""

    name: str
    status: str
    seconds: float
    processor_seconds: float | None = None


def stages_of(recipe: Recipe) -> list[Stage]:
    """The stages that the recipe asks for, in order."""
    return [stage for stage in STAGES if stage.runs(recipe)]


def open_work(job: Job, stages: Sequence[Stage], file: str, overwrite: bool = False) -> WorkFolder:
    """The work folder of the recipe in a file of that name; what is odd about it is said on stderr. Raises
    `OutputError` as `WorkFolder` does."""
    outputs = [output for stage in stages for output in stage.outputs(job.recipe.section(stage.key))]
    owner = {"name": job.recipe.name, "file": file, "model": job.recipe.model}
    work = WorkFolder(job.folder, outputs, owner, overwrite)
    say(*work.notes)
    return work


def pending(job: Job, stages: Sequence[Stage], work: WorkFolder) -> set[str]:
    """The stages that would run: those that changed, and all that need one of them."""
    stale: set[str] = set()
    for stage in stages:
        fresh = not stale & set(_needs(stage, stages))
        if not fresh or not work.current(stage.name, _fingerprint(job, stage, stages, work)):
            stale.add(stage.name)
    return stale


def run_stages(job: Job, stages: Sequence[Stage], work: WorkFolder) -> list[Outcome]:
    """Run what is not up to date, saying so on stderr; the state is saved after every stage."""
    work.create()
    outcomes = []
    seen = job  # by the next stage, with the model that was made so far
    for stage in stages:
        fingerprint = _fingerprint(job, stage, stages, work)
        outputs = stage.outputs(job.recipe.section(stage.key))
        if work.current(stage.name, fingerprint):
            for name in {Path(output).parts[0] for output in outputs}:
                remove_leftovers(job.folder / name)  # a stage that runs does it itself
                remove_lock(job.folder / name)
            known = work.finished(stage.name)
            say(f"{stage.name}: up to date (took {known.seconds:.1f} s)")
            outcomes.append(Outcome(stage.name, "up to date", known.seconds))
        else:
            outcomes.append(outcome := _run(seen, stage))
            work.finish(stage.name, fingerprint, outcome.seconds, outputs)
            say(f"{stage.name}: done in {outcome.seconds:.1f} s")
        seen = seen.behind(stage)
    return outcomes


def _run(job: Job, stage: Stage) -> Outcome:
    """Run a stage."""
    say(f"{stage.name}: running")
    start, processor = time.perf_counter(), time.process_time()
    with activity(stage.name):
        stage.run(job, job.recipe.section(stage.key))
    return Outcome(stage.name, "ran", time.perf_counter() - start, time.process_time() - processor)


def _needs(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """The names of the stages that run before a stage and from whose outputs its own is made."""
    before = stages[: stages.index(stage)]
    return [other.name for other in before if other.name in stage.needs or other.makes]


def _fingerprint(job: Job, stage: Stage, stages: Sequence[Stage], work: WorkFolder) -> str:
    """The hash of everything that the stage's outputs depend on."""
    settings = {**_shared(job), **stage.settings(job, job.recipe.section(stage.key))}
    return work.fingerprint(settings, _needs(stage, stages))


def _shared(job: Job) -> dict[str, Any]:
    """What the outputs of every stage depend on."""
    recipe, checkpoint = job.recipe, job.checkpoint
    return {
        "versions": {"sparsepack": __version__, **{name: importlib.metadata.version(name) for name in LIBRARIES}},
        "model": {
            "name": recipe.model,
            "sha256": checkpoint.sha256,
            "config": checkpoint.config.to_dict(),
            "tokenizer": sha256_bytes(checkpoint.tokenizer_json().encode()),
        },
        "device": recipe.device,
        "dtype": recipe.dtype,
    }


DEFAULT_WORK = Path("work")


@dataclass(frozen=True)
class RecipeOutcome:
    """The report (JSON-able; of a dry run the plan), and whether every gate passed (of a dry run True)."""

    report: dict[str, Any]
    passed: bool


def run_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    work: Path | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    show: bool = True,
) -> RecipeOutcome:
    """Run a recipe; tables go to stdout, progress to stderr, everything to `report.json` in the work folder.

    path      -- a YAML file, or the bare name of a ready-made recipe
    overrides -- `a.b=c` each, c in YAML
    work      -- folder of the outputs (default `work/NAME`); stages that are up to date in it do not run again
    dry_run   -- run no model and write nothing: print what would be made
    overwrite -- replace what another recipe left in the work folder; it is refused otherwise
    show      -- print the tables

    Relative paths in the recipe start at the working directory.
    Raises `RecipeError` for a recipe that cannot be run as it stands, before anything runs, and other `UserError`s.
    """
    recipe = load_recipe(path, overrides)
    # Heavy from here on: a mistake in the recipe is told without waiting for torch.
    from sparsepack.files.atomic import write_json
    from sparsepack.files.side_files import check_no_link
    from sparsepack.recipe import plan, report
    from sparsepack.recipe.load import open_job

    if work is None:  # nobody named the folder: a stranger's may hold a link under its name
        for folder in (DEFAULT_WORK, DEFAULT_WORK / recipe.name):
            check_no_link(folder)
    job = open_job(recipe, work if work is not None else DEFAULT_WORK / recipe.name)
    stages = stages_of(recipe)
    state = open_work(job, stages, locate(Path(path)).name, overwrite)
    if dry_run:
        planned = plan.make_plan(job, stages, pending(job, stages, state))
        plan.show(planned)
        return RecipeOutcome(planned, True)
    made = report.collect(job, run_stages(job, stages, state), report.command(path, overrides, work))
    if show:
        report.show(made)
    verdicts = judge(recipe.section("gates"), made)
    passed = all(verdict.passed for verdict in verdicts)
    made |= {"gates": [asdict(verdict) for verdict in verdicts], "passed": passed}
    write_json(job.folder / report.REPORT, made)
    if verdicts:
        report.show_verdicts(verdicts)
    return RecipeOutcome(made, passed)

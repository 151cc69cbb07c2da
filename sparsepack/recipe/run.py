"""`run`: read a recipe, run its stages, show what came of it, judge its gates."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsepack.recipe.gates import Verdict
from sparsepack.recipe.load import load_recipe, locate
from sparsepack.recipe.schema import Gates
from sparsepack.recipe.stages import STAGES

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
) -> RecipeOutcome:
    """Run a recipe; tables go to stdout, progress to stderr, everything to `report.json` in the work folder.

    path      -- a YAML file, or the bare name of a ready-made recipe
    overrides -- `a.b=c` each, c in YAML
    work      -- folder of the outputs (default `work/NAME`); stages that are up to date in it do not run again
    dry_run   -- run no model and write nothing: print what would be made
    overwrite -- replace what another recipe left in the work folder; it is refused otherwise

    Relative paths in the recipe start at the working directory.
    Raises `RecipeError` for a recipe that cannot be run as it stands, before anything runs, and other `UserError`s.
    """
    recipe = load_recipe(path, overrides)
    # Heavy from here on: a mistake in the recipe is told without waiting for torch.
    from sparsepack.files.atomic import write_json
    from sparsepack.files.side_files import check_no_link
    from sparsepack.recipe import plan, report
    from sparsepack.recipe.consistency import open_job
    from sparsepack.recipe.runner import open_work, pending, run_stages, stages_of

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
    report.show(made)
    verdicts = judge(recipe.asked("gates"), made)
    passed = all(verdict.passed for verdict in verdicts)
    made |= {"gates": [asdict(verdict) for verdict in verdicts], "passed": passed}
    write_json(job.folder / report.REPORT, made)
    if verdicts:
        report.show_verdicts(verdicts)
    return RecipeOutcome(made, passed)


def judge(gates: Any, results: Mapping[str, Any]) -> list[Verdict]:
    """Every stage's verdicts on `results`, the report; None for no gates.

    A verification that failed is a verdict whether or not a gate asks for it. Raises `RecipeError` for a gate on a
    task's metric that does not exist.
    """
    return [verdict for stage in STAGES for verdict in stage.judge(gates or Gates(), results)]

"""`run`: read a recipe, run its stages, show what came of it, judge its gates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsepack.recipe.load import load_recipe

DEFAULT_WORK = Path("work")


@dataclass(frozen=True)
class RecipeOutcome:
    """The report (JSON-able; of a dry run the plan), and whether every gate passed (of a dry run True)."""

    report: dict[str, Any]
    passed: bool


def run_recipe(
    path: Path, overrides: Sequence[str] = (), work: Path | None = None, dry_run: bool = False
) -> RecipeOutcome:
    """Run a recipe; tables go to stdout, progress to stderr, everything to `report.json` in the work folder.

    path      -- a YAML file, or the bare name of a ready-made recipe
    overrides -- `a.b=c` each, c in YAML
    work      -- folder of the outputs (default `work/NAME`); stages that are up to date in it do not run again
    dry_run   -- run no model and write nothing: print what would be made

    Relative paths in the recipe start at the working directory.
    Raises `RecipeError` for a recipe that cannot be run as it stands, before anything runs, and other `UserError`s.
    """
    recipe = load_recipe(path, overrides)
    # Heavy from here on: a mistake in the recipe is told without waiting for torch.
    from sparsepack.files.atomic import write_json
    from sparsepack.recipe import plan, report
    from sparsepack.recipe.consistency import open_sources
    from sparsepack.recipe.console import say
    from sparsepack.recipe.gates import judge
    from sparsepack.recipe.stages import pending, run_stages, stages_of
    from sparsepack.recipe.state import WorkFolder

    sources = open_sources(recipe)
    folder = work if work is not None else DEFAULT_WORK / recipe.name
    stages = stages_of(recipe, sources, folder)
    state = WorkFolder(folder, [output for stage in stages for output in stage.outputs])
    for note in state.notes:
        say(note)
    if dry_run:
        stale = pending(stages, state)
        planned = plan.make_plan(recipe, sources, {stage.name: stage.name in stale for stage in stages})
        plan.show(planned)
        return RecipeOutcome(planned, True)
    outcomes = run_stages(stages, state)
    made = report.collect(recipe, folder, outcomes)
    report.show(made)
    verdicts = judge(recipe.gates, made)
    passed = all(verdict.passed for verdict in verdicts)
    made |= {"gates": [asdict(verdict) for verdict in verdicts], "passed": passed}
    write_json(folder / report.REPORT, made)
    if verdicts:
        report.show_verdicts(verdicts)
    return RecipeOutcome(made, passed)

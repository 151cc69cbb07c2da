"""A program of its own: runs a recipe and prints, as JSON, the memory that each stage was to take and what it took.

arguments: recipe, work folder, overrides
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from sparsepack.recipe import run as runner
from sparsepack.recipe import run_recipe
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stage import Job, Stage

STAGES_OF = runner.stages_of
took: dict[str, int] = {}


def _measured(stage: Stage) -> Stage:
    def run(job: Job, asked: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, at what is taken now
        stage.run(job, asked)
        lines = Path("/proc/self/status").read_text().splitlines()
        took[stage.name] = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    return dataclasses.replace(stage, run=run)


def _stages_of(recipe: Recipe) -> list[Stage]:
    return [_measured(stage) for stage in STAGES_OF(recipe)]


planned = run_recipe(Path(sys.argv[1]), sys.argv[3:], Path(sys.argv[2]), dry_run=True).report["peak_memory_bytes"]
runner.stages_of = _stages_of
run_recipe(Path(sys.argv[1]), sys.argv[3:], Path(sys.argv[2]))
print(json.dumps({"planned": planned, "took": took}))

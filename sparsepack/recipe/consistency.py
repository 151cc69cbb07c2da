"""What does not go together, noticed before anything runs: first in any recipe, then beside the model at hand.

Each stage says what its own section needs; this is the one place that asks.
"""

from collections.abc import Iterator
from pathlib import Path

from sparsepack.errors import RecipeError
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job
from sparsepack.recipe.stages import STAGES


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` for the first contradiction."""
    for problem in _problems(recipe):
        raise RecipeError(problem)


def _problems(recipe: Recipe) -> Iterator[str]:
    for stage in STAGES:
        if asked := recipe.asked(stage.key):
            yield from stage.problems(recipe, asked)
            if isinstance(asked, Section) and hasattr(asked, "options"):
                yield from asked.idle()
    gates = recipe.asked("gates")
    if gates is not None:
        for stage in STAGES:
            yield from stage.unmeasured(recipe, gates)


def open_job(recipe: Recipe, folder: Path) -> Job:
    """Open the model and read the texts.

    Raises `UserError` subclasses where one cannot be read or the model does not allow what the recipe asks for, so that
    no stage finds that out after hours.
    """
    from sparsepack.models.checkpoint.checkpoint import open_checkpoint

    job = Job(recipe, open_checkpoint(recipe.model), folder)
    for problem in _misfits(job):
        raise RecipeError(problem)
    return job


def _misfits(job: Job) -> Iterator[str]:
    device = job.recipe.device
    if device != "cpu" and not _available(device):
        yield f"device: {device}; torch finds none on this machine, use cpu"
    for stage in STAGES:
        if asked := job.recipe.asked(stage.key):
            yield from stage.misfits(job, asked)
            job = job.ahead_of(stage)


def _available(device: str) -> bool:
    import torch

    if device == "mps":
        return torch.backends.mps.is_available()
    return int(device.partition(":")[2] or 0) < torch.cuda.device_count()

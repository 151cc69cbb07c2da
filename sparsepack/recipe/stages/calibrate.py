"""`calibrate`: every statistic that a packer needs, over the calibration text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.recipe.section import PATH, Names, Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves

FOLDER = "calibration"


def name_again(made: str) -> str:
    """The name of the stage that calibrates again, with the model of that name in the work folder."""
    return f"calibrate_{made}"


AGAIN = (name_again("rotated"), name_again("pruned"), name_again("distilled"))
"""The stages of these names do so."""


class Calibrate(Section):
    """Every statistic that thresholds, heavy channels and a basis are taken from, over a text, which is also what
    pruning and distilling look at. Where a recipe rotates, prunes or distils, and then skips or reads few tokens, the
    model that was made is calibrated again: both are about its own activations."""

    key: ClassVar[str] = "calibrate"
    options: ClassVar[type] = CalibrateOptions
    every: ClassVar[bool] = True

    text: Annotated[Names, PATH] = Field(
        min_length=1, description="What to run: a file, a data set of the hub or shipped:train; several are one text."
    )


def _problems(recipe: Recipe, section: Calibrate) -> Iterator[str]:
    if section.context is not None and section.context <= section.sinks:
        yield f"calibrate.sinks: {section.sinks}; expected fewer than context, {section.context}"


def _misfits(job: Job, section: Calibrate) -> Iterator[str]:
    yield from job.too_long("calibrate.context", section.context)
    job.text(section.text, f"{Calibrate.key}.text")


def _settings(job: Job, section: Calibrate) -> dict[str, Any]:
    return {**section.model_dump(mode="json"), "text_sha256": job.text(section.text).sha256}


def _run(job: Job, section: Calibrate) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.collection import calibrate

    options = section.as_options(job.recipe)
    calibrate(job.checkpoint, job.text(section.text), folder_of(job), options, overwrite=True)


def folder_of(job: Job) -> Path:
    """The folder of the model's calibration, as the recipe names it or as it was made since."""
    return job.folder / (f"{FOLDER}_{job.made}" if job.made else FOLDER)


def files_of(folder: str) -> tuple[str, ...]:
    """What a calibration leaves."""
    return (f"{folder}/calibration.json", f"{folder}/calibration.safetensors")


def windows(job: Job, section: Calibrate) -> tuple[int, int]:
    """How many windows are run, and of how many tokens each."""
    (drawn, _), context = windows_and_held_out(job, section)
    return drawn, context


def windows_and_held_out(job: Job, section: Calibrate) -> tuple[tuple[int, int], int]:
    """How many windows are run and how many are held out, and of how many tokens each."""
    from sparsepack.calibrate.collection import samples_of
    from sparsepack.models.tokenizer.windows import drawn_and_held_out, window_length
    from sparsepack.recipe.plan import windows_in

    context = window_length(section.context, job.checkpoint.config.max_position_embeddings)
    samples = samples_of(job.checkpoint, section.samples, context, job.recipe.device)
    count = windows_in(job, section.text, context, samples and samples + section.held_out)
    return drawn_and_held_out(count, samples, section.held_out), context


def _tokens(job: Job, section: Calibrate) -> int:
    count, context = windows(job, section)
    return count * context


def _memory(job: Job, section: Calibrate) -> int:
    """The bytes of the text's way through a block, and of the sums of products of the residual stream."""
    from sparsepack.calibrate.collection import at_once
    from sparsepack.calibrate.folder import residual_of
    from sparsepack.recipe.plan import block_by_block_bytes

    residual = residual_of(job.checkpoint)
    # Those of runs of blocks that are over, that of the run at hand, and of a batch what is added to it.
    sums = 0 if residual is None else residual["runs"] + 3
    squares = 8 * int(job.checkpoint.config.hidden_size) ** 2
    batch = at_once(section.batch, *windows(job, section), job.recipe.device)
    return block_by_block_bytes(job, *windows(job, section), batch) + sums * squares


CALIBRATE = Stage(
    name="calibrate",
    key=Calibrate.key,
    type=Calibrate | None,
    outputs=leaves(*files_of(FOLDER)),
    settings=_settings,
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
)

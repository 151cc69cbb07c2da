"""`distil`: the model with weights trained for skipping, or since it was pruned, which every later stage takes in its
place."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepack.calibrate.distil import DistilOptions
from sparsepack.errors import UserError
from sparsepack.models.provenance import DISTILLATION_FILE
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.calibrate import AGAIN, CALIBRATE, Calibrate, folder_of, windows
from sparsepack.recipe.stages.prune import pruned

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Provenance

FOLDER = "distilled"


class Distil(Section):
    """The model with weights trained so that skipping changes its output least, after it is rotated ([how](distil.md)).
    A model that is pruned is trained after that: what is left of it learns from the model from before. Later steps take
    the distilled model, which lies as `distilled` in the work folder."""

    key: ClassVar[str] = "distil"
    options: ClassVar[type] = DistilOptions
    every: ClassVar[bool] = True


def distilled(recipe: Recipe) -> bool:
    """Whether the model is distilled before it is packed."""
    return Distil.find_in(recipe) is not None


def distils_by_statistics(recipe: Recipe) -> bool:
    """Whether the model is distilled for skipping, where a pruned one needs statistics of its own: the thresholds that
    are trained along begin with them."""
    section = Distil.find_in(recipe)
    return section is not None and bool(section.sparsity)


def _options(job: Job, section: Distil) -> DistilOptions:
    options: DistilOptions = section.as_options(job.recipe)
    return options.of_model(_pruned(job))


def _pruned(job: Job) -> bool:
    """Whether the model that is trained is a pruned one."""
    from sparsepack.models.provenance import pruning_record

    return pruned(job.recipe) or pruning_record(job.checkpoint.path) is not None


def _problems(recipe: Recipe, section: Distil) -> Iterator[str]:
    if Calibrate.find_in(recipe) is None:
        yield "distil: it trains on the text of a calibration; add a calibrate section"


def _misfits(job: Job, section: Distil) -> Iterator[str]:
    from sparsepack.calibrate.distillation import check_model, check_windows, teacher_of

    calibrate = Calibrate.find_in(job.recipe)
    assert calibrate is not None  # or the recipe would have been refused
    try:
        check_model(job.checkpoint)
        if not pruned(job.recipe):
            teacher_of(job.checkpoint)
        check_windows(*windows(job, calibrate), _options(job, section), "calibrate")
    except UserError as error:
        yield f"distil: {error}"


def _run(job: Job, section: Distil) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.distillation import distil

    options = _options(job, section)
    before = job.before if pruned(job.recipe) else None
    calibration = folder_of(job if before is None or options.sparsity else before)
    teacher = None if before is None else before.checkpoint
    distil(job.checkpoint, calibration, job.folder / FOLDER, options, overwrite=True, teacher=teacher)


def _expected(job: Job, section: Distil) -> "Checkpoint":
    """The distilled model as far as it is known before its weights are."""
    from sparsepack.models.checkpoint.writer import distilled

    return distilled(job.checkpoint, {}, section.weights)


def predicted_record(job: Job) -> "Provenance | None":
    """What the distilled checkpoint will say of itself; None where the recipe distils nothing."""
    from sparsepack.calibrate.distillation import matrices
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.files.tensors import type_name
    from sparsepack.models.provenance import Provenance

    section, checkpoint = Distil.find_in(job.recipe), job.checkpoint
    if section is None:
        return None
    teacher = checkpoint.name if _pruned(job) else None
    source = {"model": checkpoint.name, "model_sha256": checkpoint.sha256, "calibration_sha256": NO_HASH}
    how = {"sparsity": _options(job, section).sparsity, "rank": section.rank, "offsets": section.offsets}
    figures = {name: {"sparse": 0.12345678901234567, "prompt": 0.00123456789012345} for name in ("before", "after")}
    changes = dict.fromkeys(matrices(checkpoint), 0.0012345)
    made = {"weights": type_name(checkpoint.dtype), **figures, "changes": changes}
    return Provenance({**how, **made, **source, "teacher": teacher})


def _length(job: Job, section: Distil) -> int:
    """Tokens of a window that is trained on."""
    calibrate = Calibrate.find_in(job.recipe)
    length = _options(job, section).length
    return min(length, windows(job, calibrate)[1]) if calibrate is not None else length


def _tokens(job: Job, section: Distil) -> int:
    """How many tokens are run: those of the training, which trains on first halves, too, and those that the model is
    measured on before and after it."""
    from sparsepack.calibrate.distillation import MEASURED
    from sparsepack.recipe.plan import trained_tokens

    options, length = _options(job, section), _length(job, section)
    first_halves = 3 * options.steps * options.batch * (length // 2)
    sparse = length - length // 2 if options.sparsity else 0
    measured = MEASURED * (length + 2 * (length + sparse))
    return trained_tokens(options.steps, options.batch, length) + first_halves + measured


def _memory(job: Job, section: Distil) -> int:
    """The bytes of the model, of its teacher where that is another, of what is trained with its gradients and Adam's
    moments, of what enters each block, and of the larger of a block's activations and a part of the logits."""
    from math import prod

    from sparsepack.calibrate.distillation import matrices
    from sparsepack.calibrate.teal import LOGITS
    from sparsepack.models.family import SITES
    from sparsepack.recipe.plan import LIVE, dtype_bytes, parameters

    checkpoint, size, options = job.checkpoint, dtype_bytes(job), _options(job, section)
    shapes = [checkpoint.source.shapes[name] for name in matrices(checkpoint)]
    trained = sum(prod(shape) if options.rank is None else options.rank * sum(shape) for shape in shapes)
    tokens = options.batch * _length(job, section)
    hidden, vocabulary = int(checkpoint.config.hidden_size), int(checkpoint.config.vocab_size)
    kept = tokens * hidden * size * (checkpoint.layers + 4)
    at_once = tokens // 2 if options.sparsity else tokens
    block = at_once * sum(sum(checkpoint.stacked_shape(site)) for site in SITES) * 4 * LIVE
    logits = 8 * 4 * min(LOGITS, at_once * vocabulary)
    models = 2 if _pruned(job) else 1
    return models * parameters(checkpoint) * size + 16 * trained + kept + max(block, logits)


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["distil"]
    if made is not None:
        before, after = made["before"], made["after"]
        prompts = f", of dense prompts to {after['prompt']:.4f}" if made["options"]["sparsity"] else ""
        yield (
            f"distilled: over {made['tokens']:,} tokens of the calibration the KL divergence went from "
            f"{before['sparse']:.4f} to {after['sparse']:.4f}{prompts}"
        )


DISTIL = Stage(
    name="distil",
    key=Distil.key,
    type=Distil | None,
    needs=(CALIBRATE.name, *AGAIN),
    makes=FOLDER,
    expected=_expected,
    outputs=leaves(FOLDER),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    result=("distil", read_json(f"{FOLDER}/{DISTILLATION_FILE}"), None),
    show=_show,
)

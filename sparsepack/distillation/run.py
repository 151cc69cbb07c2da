"""`distil`: a model whose weights were trained so that skipping or pruning changes its output least, as an ordinary
checkpoint.

The state of the training is kept beside the output, in `.NAME.unfinished`, from which a run that was killed goes on.
"""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from sparsepack.calibration.folder import load as load_calibration
from sparsepack.distillation.options import DistilOptions
from sparsepack.distillation.train import matrices, measured_after, measured_windows, teacher_of, train
from sparsepack.errors import DistillationError
from sparsepack.files.atomic import check_inputs, check_output
from sparsepack.files.hashing import fingerprint
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.checkpoint.distilled import distilled, texts_of_distilled
from sparsepack.models.checkpoint.writer import write_checkpoint
from sparsepack.models.precision import type_name
from sparsepack.models.records.distilled import RECORD, Distilled, distillation_record
from sparsepack.models.records.made import records_beside
from sparsepack.models.verbs import check_taken
from sparsepack.option import check_type
from sparsepack.version import __version__
from sparsepack.workers.resume import ResumeState, state_beside


def distil(
    model: Checkpoint | str | Path,
    calibration: Path,
    output: Path,
    options: DistilOptions | None = None,
    overwrite: bool = False,
    teacher: Checkpoint | str | Path | None = None,
) -> Distilled:
    """Write a model whose weights were trained so that skipping, or having been pruned, changes its output least: an
    ordinary checkpoint, a Hugging Face folder. What it learns from is the model itself, dense, on the calibration's
    text; a pruned model, whose zeros stay zeros, learns from the model that it was pruned from.

    calibration -- a folder made by `calibrate` of this model; where nothing is skipped, one of the teacher will do
    teacher     -- what a pruned model was pruned from (default: where its record says)

    Raises `DistillationError` for options that make no sense, a model that was distilled before, a teacher that is not
    there or another model, a calibration with too few windows, and weights that training took too far;
    `CalibrationError` for a calibration of another model; `OutputError`.
    """
    options = options or DistilOptions()
    check_type("model", model, Checkpoint | Path, DistillationError)
    check_type("calibration", calibration, Path, DistillationError)
    check_type("output", output, Path, DistillationError)
    check_type("options", options, DistilOptions, DistillationError)
    check_type("teacher", teacher, Checkpoint | Path | None, DistillationError)
    options.check()
    output = Path(output)
    check_output(output, overwrite, folder=True, marker=RECORD)
    checkpoint = checkpoint_of(model)
    check_inputs(output, [checkpoint.path, Path(calibration)])
    check_model(checkpoint)
    source = teacher_of(checkpoint, teacher)
    options = options.of_model(source is not None)
    read = load_calibration(calibration)
    # Where nothing is skipped, only its text counts, and the model was pruned on that of its teacher.
    texts_of = (checkpoint,) if options.sparsity or source is None else (source, checkpoint)
    read.check_model(next((of for of in texts_of if read.manifest["model"]["sha256"] == of.sha256), checkpoint))
    check_windows(len(read.windows), read.windows.shape[1], options, str(calibration))
    asked = {"model": checkpoint.sha256, "calibration": read.sha256, "options": asdict(options)}
    with state_beside(output) as state:
        resume = ResumeState(state, fingerprint({"sparsepack": __version__, **asked}))
        trained = train(checkpoint, read, options, resume, source)
        merged = {name: update.merged for name, update in trained.updates.items()}
        made = distilled(checkpoint, merged, options.weights)
        changes = {name: _change(checkpoint.tensor(name), made.tensor(name)) for name in matrices(checkpoint)}
        _check_changes(changes)
        record = Distilled(
            model=checkpoint.name,
            model_sha256=checkpoint.sha256,
            teacher=None if source is None else source.name,
            calibration_sha256=read.sha256,
            options=asdict(options),
            weights=type_name(made.dtype),
            tokens=measured_windows(read, options).numel(),
            before=trained.before,
            after=measured_after(made, read, options, trained),
            changes=changes,
        )
        records = {**records_beside(checkpoint.path), RECORD: record.to_json()}
        write_checkpoint(made, texts_of_distilled(checkpoint, made), records, output, overwrite)
    return record


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `DistillationError` for a model that was distilled before, `CheckpointError` for one with experts."""
    check_taken("distil", checkpoint.family, checkpoint.name)
    if (before := distillation_record(checkpoint.path)) is not None:
        raise DistillationError(
            f"{checkpoint.name}: distilled already, from {before.summary['model']}; distil that model, with more "
            "--steps if need be"
        )


def check_windows(count: int, length: int, options: DistilOptions, where: str) -> None:
    """Raise `DistillationError` for fewer calibration windows than a step takes, or too short ones.

    where -- whose windows they are, for the message
    """
    if count < options.batch:
        raise DistillationError(
            f"{where}: {count} windows, of which a step takes {options.batch}; calibrate with more --samples or a "
            "longer text, or give a smaller --batch"
        )
    if length < 2:
        raise DistillationError(
            f"{where}: windows of {length} token; expected 2 or more: calibrate with more --context"
        )


def _change(own: Tensor, made: Tensor) -> float:
    """How far a tensor is from what it was, relative, to five digits."""
    own = own.double()
    norm = float(own.norm())
    moved = float((made.double() - own).norm())
    return float(f"{moved / norm if norm else moved:.5g}")


def _check_changes(changes: dict[str, float]) -> None:
    name, largest = max(changes.items(), key=lambda change: change[1])
    if not largest < 1:
        raise DistillationError(
            f"{name}: training changed it by {largest:.3g} of its size, and it is no longer the model; give a smaller "
            "--rate"
        )

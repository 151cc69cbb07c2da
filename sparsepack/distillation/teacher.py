"""The model that a pruned model learns from: the one that it was pruned from."""

from pathlib import Path

from sparsepack.errors import CheckpointError, DistillationError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.records.pruned import pruning_record


def teacher_of(checkpoint: Checkpoint, given: Checkpoint | str | Path | None = None) -> Checkpoint | None:
    """The model that a model was pruned from; None for one that was not pruned, which learns from itself.

    given -- that model, or where it lies (default: where the record of pruning says)

    Raises `DistillationError` where it is not there, is another model or has no use, `CheckpointError` where what was
    given cannot be opened.
    """
    record = pruning_record(checkpoint.path)
    if record is None:
        if given is not None:
            name = given.name if isinstance(given, Checkpoint) else given
            raise DistillationError(
                f"teacher {name}: {checkpoint.name} was not pruned and learns from itself; leave --teacher out"
            )
        return None
    name, digest = record.summary["model"], record.summary["model_sha256"]
    try:
        found = checkpoint_of(name if given is None else given)
    except CheckpointError as error:
        if given is not None:
            raise
        raise DistillationError(
            f"{checkpoint.name}: it learns from the model that it was pruned from, and {name} is not there; "
            "give --teacher"
        ) from error
    if found.sha256 != digest:
        raise DistillationError(
            f"{found.name} (SHA-256 {found.sha256[:12]}): {checkpoint.name} was pruned from another model, {name} "
            f"({digest[:12]}); give that one as --teacher"
        )
    return found

"""What was done to a checkpoint before: the records beside its weights, one for each verb that makes a checkpoint from
another."""

import json
from pathlib import Path
from typing import Any

from sparsepack.models.records import distilled, pruned, rotated
from sparsepack.models.records.distilled import distillation_record
from sparsepack.models.records.pruned import pruning_record
from sparsepack.models.records.rotated import rotation_record

_RECORDS = (
    (rotated.RECORD, rotation_record),
    (distilled.RECORD, distillation_record),
    (pruned.RECORD, pruning_record),
)


def records_beside(folder: Path) -> dict[str, Any]:
    """What the records beside a checkpoint hold, by their names. Raises `CheckpointError` for one that is damaged."""
    found = {name: read(folder) for name, read in _RECORDS}
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name, record in found.items() if record}


def made_from(folder: Path) -> tuple[str, ...]:
    """The hashes of the checkpoints that this one was made from. Raises `CheckpointError` as `records_beside`."""
    found = [read(folder) for _, read in _RECORDS]
    return tuple(record.summary["model_sha256"] for record in found if record)

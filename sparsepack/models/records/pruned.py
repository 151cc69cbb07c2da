"""The record of what was done to a pruned checkpoint: `sparsepack_prune.json` beside its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsepack.files.stored import Name, Size, Stored
from sparsepack.models.records.pattern import Pattern
from sparsepack.models.records.record import read_record
from sparsepack.version import __version__

RECORD = "sparsepack_prune.json"
SCHEMA = 1


@dataclass(frozen=True)
class PrunedMatrix:
    """A matrix and what became of it.

    matrix   -- its name in the checkpoint, without `.weight`, or that of the stock model for those of all experts of a
                block; site -- `blk.LAYER.SITE`
    keep, of -- nonzeros that stay in each group of inputs
    tail     -- inputs of the last group where it is shorter; it may hold as many nonzeros as any other. Else 0
    density  -- share of its weights that are not zero
    error    -- of its outputs, relative: see `Inputs.relative_error`; of experts over all of them
    permuted -- whether its inputs were put into another order
    """

    matrix: str
    site: str
    keep: int
    of: int
    tail: int
    density: float
    error: float
    permuted: bool


@dataclass(frozen=True)
class Pruned:
    """A pruned checkpoint.

    model, model_sha256 -- what it was made from
    calibration_sha256  -- None where no inputs mattered
    options             -- as asked
    matrices            -- those that were pruned
    """

    model: str
    model_sha256: str
    calibration_sha256: str | None
    options: Mapping[str, Any]
    matrices: tuple[PrunedMatrix, ...]

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, "kind": "pruned", "sparsepack": __version__, **asdict(self)}


class _Matrix(Stored):
    matrix: Name
    keep: Size
    of: Size


class _Options(Stored):
    method: Name
    permute: bool


class _Record(Stored):
    model: Name
    model_sha256: Name
    calibration_sha256: Name | None
    options: _Options
    matrices: list[_Matrix]


@dataclass(frozen=True)
class PruningRecord:
    """What a pruned checkpoint says of itself.

    patterns -- of each pruned matrix, by its name without `.weight`
    summary  -- method, permute, model, model_sha256, calibration_sha256; JSON-able
    """

    patterns: Mapping[str, Pattern]
    summary: Mapping[str, Any]


def pruning_record(folder: Path) -> PruningRecord | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` as `read_record`."""
    return read_record(folder / RECORD, SCHEMA, _Record, _recorded, "prune the model again")


def _recorded(record: _Record) -> PruningRecord:
    patterns = {row.matrix: Pattern(row.keep, row.of) for row in record.matrices}
    source = {"model": record.model, "model_sha256": record.model_sha256}
    how = {"method": record.options.method, "permute": record.options.permute}
    return PruningRecord(patterns, {**how, **source, "calibration_sha256": record.calibration_sha256})

"""The record of what was done to a rotated checkpoint: `sparsepack_rotate.json` beside its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from sparsepack.files.stored import Count, Name, Stored
from sparsepack.models.records.record import read_record
from sparsepack.version import __version__

RECORD = "sparsepack_rotate.json"
SCHEMA = 1


@dataclass(frozen=True)
class Rotated:
    """A rotated checkpoint.

    model, model_sha256 -- what it was made from
    calibration_sha256  -- whose windows were run to compare the two
    options             -- as asked
    boundaries          -- the blocks before which the stream changes its basis
    weights             -- the type in which its matrices are stored
    tokens              -- how many were run
    error               -- of the logits beside those of the model, over these tokens, relative
    notes               -- what it costs and whom it suits, a sentence each
    """

    model: str
    model_sha256: str
    calibration_sha256: str
    options: Mapping[str, Any]
    boundaries: tuple[int, ...]
    weights: str
    tokens: int
    error: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, "kind": "rotated", "sparsepack": __version__, **asdict(self)}


class _Options(Stored):
    basis: Name
    seed: Count


class _Record(Stored):
    model: Name
    model_sha256: Name
    calibration_sha256: Name
    options: _Options
    boundaries: list[Count] = Field(default_factory=list)
    weights: Name
    error: float


@dataclass(frozen=True)
class RotationRecord:
    """What a rotated checkpoint says of itself.

    summary -- basis, boundaries, seed, weights, error, model, model_sha256, calibration_sha256; JSON-able
    """

    summary: Mapping[str, Any]


def rotation_record(folder: Path) -> RotationRecord | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` as `read_record`."""
    return read_record(folder / RECORD, SCHEMA, _Record, _recorded, "rotate the model again")


def _recorded(record: _Record) -> RotationRecord:
    source = {"model": record.model, "model_sha256": record.model_sha256}
    options = record.options
    how = {"basis": options.basis, "boundaries": record.boundaries, "seed": options.seed, "weights": record.weights}
    how["error"] = record.error
    return RotationRecord({**how, **source, "calibration_sha256": record.calibration_sha256})


def basis_in_words(basis: str, boundaries: Sequence[int]) -> str:
    """Into what a model was rotated; `boundaries` are the blocks before which the stream changes its basis."""
    if not boundaries:
        return f"the basis {basis}"
    *starts, last = (0, *boundaries)
    listed = f"{', '.join(map(str, starts))} and {last}"
    return f"the basis {basis} of each of {len(boundaries) + 1} segments (from blocks {listed} on)"

"""The record of what was done to a distilled checkpoint: `sparsepack_distil.json` beside its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sparsepack.files.stored import Name, Size, Stored
from sparsepack.models.records.record import read_record
from sparsepack.version import __version__

RECORD = "sparsepack_distil.json"
SCHEMA = 1


@dataclass(frozen=True)
class Figures:
    """A model beside the one that it should follow, on text of the calibration.

    sparse, prompt -- KL divergence, of what is decoded, with channels skipped if any are, and of dense prompts
    skipped        -- the share of weights that was
    """

    sparse: float
    prompt: float
    skipped: float


@dataclass(frozen=True)
class Distilled:
    """A distilled checkpoint.

    model, model_sha256 -- what it was made from
    teacher             -- the name of the model that this one had been pruned from and learnt from; None: it was not
                           pruned and learnt from itself
    calibration_sha256  -- on whose windows it was trained
    options             -- as asked, with the sparsity and the rate that were taken
    weights             -- the type in which its matrices are stored
    tokens              -- how many it was measured on, of these windows
    before, after       -- the model with the first, uniform thresholds; the distilled one with those trained along
    changes             -- of each trained tensor, relative
    """

    model: str
    model_sha256: str
    teacher: str | None
    calibration_sha256: str
    options: Mapping[str, Any]
    weights: str
    tokens: int
    before: Figures
    after: Figures
    changes: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, "kind": "distilled", "sparsepack": __version__, **asdict(self)}


Share = Annotated[float, Field(ge=0, lt=1)]


class StoredFigures(Stored):
    """A model beside the one that it should follow, in a file."""

    sparse: float
    prompt: float


class StoredDistillation(Stored):
    """What a record and a manifest both say of a distillation."""

    model: Name
    model_sha256: Name
    teacher: Name | None
    calibration_sha256: Name
    before: StoredFigures
    after: StoredFigures
    changes: Annotated[dict[Name, Share], Field(min_length=1)]

    @property
    def figures(self) -> dict[str, StoredFigures]:
        """The figures by when they were measured."""
        return {"before": self.before, "after": self.after}


class _Options(Stored):
    sparsity: Share
    rank: Size | None
    offsets: bool


class _Record(StoredDistillation):
    options: _Options
    weights: Name


@dataclass(frozen=True)
class DistillationRecord:
    """What a distilled checkpoint says of itself.

    summary -- sparsity, rank, offsets, weights, before, after, changes, model, model_sha256, teacher,
               calibration_sha256; JSON-able
    """

    summary: Mapping[str, Any]


def distillation_record(folder: Path) -> DistillationRecord | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` as `read_record`."""
    return read_record(folder / RECORD, SCHEMA, _Record, _recorded, "distil the model again")


def _recorded(record: _Record) -> DistillationRecord:
    asked = {name: getattr(record.options, name) for name in ("sparsity", "rank", "offsets")}
    source = {"model": record.model, "model_sha256": record.model_sha256, "teacher": record.teacher}
    figures = {name: {"sparse": of.sparse, "prompt": of.prompt} for name, of in record.figures.items()}
    made = {"weights": record.weights, **figures, "changes": record.changes}
    return DistillationRecord({**asked, **made, **source, "calibration_sha256": record.calibration_sha256})


def in_words(summary: Mapping[str, Any]) -> str:
    """What a distillation did, as a clause, from a record's summary or a manifest."""
    before, after, sparsity = summary["before"], summary["after"], summary["sparsity"]
    skipped = f" for {100 * sparsity:.3g} % skipped" if sparsity else ""
    prompts = f", of dense prompts to {after['prompt']:.4f}" if sparsity else ""
    return (
        f"{trained_in_words(summary['rank'], summary['teacher'] is not None)} of its blocks trained{skipped}: on its "
        f"calibration text the KL divergence from {summary['teacher'] or summary['model']} went from "
        f"{before['sparse']:.4f} to {after['sparse']:.4f}{prompts}; matrices changed by "
        f"{100 * max(summary['changes'].values()):.2g} % at most"
    )


def trained_in_words(rank: int | None, pruned: bool) -> str:
    """What is trained of matrices."""
    return "what pruning left" if pruned else "all weights" if rank is None else f"updates of rank {rank}"

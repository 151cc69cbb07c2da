"""What was done to a checkpoint: a JSON file beside its weights for each command that makes a checkpoint of another,
`sparsepack_rotate.json`, `sparsepack_distil.json` and `sparsepack_prune.json`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.stored import Count, Model, Name, Size, Stored, shown, validate
from sparsepack.models.pattern import Pattern
from sparsepack.version import __version__

ROTATION_FILE = "sparsepack_rotate.json"
DISTILLATION_FILE = "sparsepack_distil.json"
PRUNING_FILE = "sparsepack_prune.json"
SCHEMA = 1


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint says of one command that made it.

    summary  -- JSON-able: model, model_sha256, calibration_sha256; of a rotation basis, boundaries, seed, weights,
                error; of a distillation sparsity, rank, offsets, weights, before, after, changes, teacher; of pruning
                method, permute
    patterns -- of each pruned matrix, by its name without `.weight`
    """

    summary: Mapping[str, Any]
    patterns: Mapping[str, Pattern] = field(default_factory=dict)


def _read(path: Path, model: type[Model], made: Callable[[Model], Provenance], command: str) -> Provenance | None:
    """What a file says; None where there is no such file. Raises `CheckpointError` for one that is damaged or of
    another schema."""
    if not path.is_file():
        return None
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ValueError(f"schema {str(value['schema'])[:60]}, this sparsepack reads schema {SCHEMA}")
        return made(validate(model, value))
    except (ValueError, KeyError, TypeError, RecursionError, PackingError) as error:
        raise CheckpointError(f"{path}: damaged ({shown(error)}); {command} the model again") from error


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

    def __repr__(self) -> str:
        changes = f", basis changes before blocks {list(self.boundaries)}" if self.boundaries else ""
        return f"Rotated({self.model}, {self.weights}, error {self.error:.3g}{changes})"

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, "kind": "rotated", "sparsepack": __version__, **asdict(self)}


class _RotationOptions(Stored):
    basis: Name
    seed: Count


class _RotationRecord(Stored):
    model: Name
    model_sha256: Name
    calibration_sha256: Name
    options: _RotationOptions
    boundaries: list[Count] = Field(default_factory=list)
    weights: Name
    error: float


def rotation_record(folder: Path) -> Provenance | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` for a damaged one."""
    return _read(folder / ROTATION_FILE, _RotationRecord, _rotation, "rotate")


def _rotation(record: _RotationRecord) -> Provenance:
    source = {"model": record.model, "model_sha256": record.model_sha256}
    options = record.options
    how = {"basis": options.basis, "boundaries": record.boundaries, "seed": options.seed, "weights": record.weights}
    how["error"] = record.error
    return Provenance({**how, **source, "calibration_sha256": record.calibration_sha256})


def basis_in_words(basis: str, boundaries: Sequence[int]) -> str:
    """Into what a model was rotated; `boundaries` are the blocks before which the stream changes its basis."""
    if not boundaries:
        return f"the basis {basis}"
    *starts, last = (0, *boundaries)
    listed = f"{', '.join(map(str, starts))} and {last}"
    return f"the basis {basis} of each of {len(boundaries) + 1} segments (from blocks {listed} on)"


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


class _DistillationOptions(Stored):
    sparsity: Share
    rank: Size | None
    offsets: bool


class _DistillationRecord(StoredDistillation):
    options: _DistillationOptions
    weights: Name


def distillation_record(folder: Path) -> Provenance | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` for a damaged one."""
    return _read(folder / DISTILLATION_FILE, _DistillationRecord, _distillation, "distil")


def _distillation(record: _DistillationRecord) -> Provenance:
    asked = {name: getattr(record.options, name) for name in ("sparsity", "rank", "offsets")}
    source = {"model": record.model, "model_sha256": record.model_sha256, "teacher": record.teacher}
    figures = {name: {"sparse": of.sparse, "prompt": of.prompt} for name, of in record.figures.items()}
    made = {"weights": record.weights, **figures, "changes": record.changes}
    return Provenance({**asked, **made, **source, "calibration_sha256": record.calibration_sha256})


def distillation_in_words(summary: Mapping[str, Any]) -> str:
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

    def __repr__(self) -> str:
        patterns = " and ".join(sorted({f"keep {each.keep} of {each.of}" for each in self.matrices}))
        return f"Pruned({self.model}, {len(self.matrices)} matrices, {patterns})"

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, "kind": "pruned", "sparsepack": __version__, **asdict(self)}


class _Matrix(Stored):
    matrix: Name
    keep: Size
    of: Size


class _PruningOptions(Stored):
    method: Name
    permute: bool


class _PruningRecord(Stored):
    model: Name
    model_sha256: Name
    calibration_sha256: Name | None
    options: _PruningOptions
    matrices: list[_Matrix]


def pruning_record(folder: Path) -> Provenance | None:
    """The record beside a checkpoint; None where there is none. Raises `CheckpointError` for a damaged one."""
    return _read(folder / PRUNING_FILE, _PruningRecord, _pruning, "prune")


def _pruning(record: _PruningRecord) -> Provenance:
    patterns = {row.matrix: Pattern(row.keep, row.of) for row in record.matrices}
    source = {"model": record.model, "model_sha256": record.model_sha256}
    how = {"method": record.options.method, "permute": record.options.permute}
    return Provenance({**how, **source, "calibration_sha256": record.calibration_sha256}, patterns)


_FILES = {ROTATION_FILE: rotation_record, DISTILLATION_FILE: distillation_record, PRUNING_FILE: pruning_record}


def records_beside(folder: Path) -> dict[str, Any]:
    """What the records beside a checkpoint hold, by their names. Raises `CheckpointError` for one that is damaged."""
    found = {name: read(folder) for name, read in _FILES.items()}
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name, record in found.items() if record}


def made_from(folder: Path) -> tuple[str, ...]:
    """The hashes of the checkpoints that this one was made from. Raises `CheckpointError` as `records_beside`."""
    found = [read(folder) for read in _FILES.values()]
    return tuple(record.summary["model_sha256"] for record in found if record)

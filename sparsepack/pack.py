"""`pack`: thresholds and weights into one artifact.

Nothing heavy is imported at the top: the command line and recipes read the defaults of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.errors import PackingError
from sparsepack.sparsity.options import AllocationOptions

if TYPE_CHECKING:
    from sparsepack.models.checkpoint import Checkpoint
    from sparsepack.sparsity.thresholds import Thresholds

ZIGZAG = "zigzag-q4_k"
FORMATS = (ZIGZAG, "q4_k", "f16", "bf16", "f32")
"""The zigzag GGUF, and the plain GGUFs that stock llama.cpp loads."""


@dataclass(frozen=True)
class PackRequest:
    """What to pack. Sparsity comes from `calibration` and `allocation`, or ready-made from `thresholds`, or not at all.

    output_type, embedding_type -- "auto" or a type name; see `artifacts.gguf.zigzag`
    """

    model: str
    output: Path
    format: str = ZIGZAG
    calibration: Path | None = None
    allocation: AllocationOptions | None = None
    thresholds: Path | None = None
    output_type: str = "auto"
    embedding_type: str = "auto"
    device: str = "cpu"
    overwrite: bool = False
    recipe: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise `PackingError` where the parts do not go together."""
        if self.format not in FORMATS:
            raise PackingError(f"format {self.format!r}: expected one of {', '.join(FORMATS)}")
        if self.allocation is not None:
            self.allocation.check()
        sparse = self.thresholds is not None or (self.allocation is not None and self.allocation.sparsity > 0)
        if sparse and self.format != ZIGZAG:
            raise PackingError(
                f"format {self.format}: a plain GGUF has no place for thresholds; leave --sparsity out or use {ZIGZAG}"
            )
        if self.thresholds is not None and self.allocation is not None and self.allocation.sparsity > 0:
            raise PackingError("give --thresholds or --sparsity, not both: the table has its own sparsities")
        if self.thresholds is None and sparse and self.calibration is None:
            raise PackingError("--sparsity needs --calibration, a folder made by `sparsepack calibrate`")
        if self.thresholds is None and self.allocation is None and self.calibration is not None:
            raise PackingError("--calibration alone changes nothing; say how much --sparsity to take from it")


@dataclass(frozen=True)
class Packed:
    """What came of it: the file, what the user should be told, and the thresholds inside."""

    path: Path
    notes: tuple[str, ...]
    thresholds: Thresholds | None


def pack(request: PackRequest) -> Packed:
    """Make an artifact, whole or not at all. Raises `UserError` subclasses."""
    from sparsepack.files.atomic import check_output
    from sparsepack.files.resume import state_beside
    from sparsepack.models.checkpoint import open_checkpoint

    request.check()
    check_output(request.output, request.overwrite)
    checkpoint = open_checkpoint(request.model)
    with state_beside(request.output) as state:
        table = thresholds_for(checkpoint, request, state)
        return Packed(request.output, _write(checkpoint, request, table), table)


def _write(checkpoint: Checkpoint, request: PackRequest, table: Thresholds | None) -> tuple[str, ...]:
    """Write the artifact; returns what the user should be told."""
    from sparsepack.artifacts.gguf.plain import write_plain
    from sparsepack.artifacts.gguf.zigzag import write_zigzag

    provenance = {
        "calibration": {"sha256": table.calibration_sha256} if table else None,
        "recipe": dict(request.recipe) if request.recipe else None,
        "thresholds": table.summary() if table else None,
    }
    shared: dict[str, Any] = {
        "provenance": {name: value for name, value in provenance.items() if value is not None},
        "output_type": request.output_type,
        "embedding_type": request.embedding_type,
        "device": request.device,
        "overwrite": request.overwrite,
    }
    if request.format == ZIGZAG:
        return write_zigzag(checkpoint, table.rules if table else {}, request.output, **shared)
    return write_plain(checkpoint, request.output, type=request.format, **shared)


def thresholds_for(checkpoint: Checkpoint, request: PackRequest, state: Path | None = None) -> Thresholds | None:
    """The table that the request names or asks to be found; `state` as `find_thresholds` takes it."""
    from sparsepack.calibrate import folder
    from sparsepack.sparsity.find import find_thresholds
    from sparsepack.sparsity.thresholds import read_thresholds

    if request.thresholds is not None:
        table = read_thresholds(request.thresholds)
        table.check_model(checkpoint)
        return table
    if request.allocation is None or request.calibration is None:
        return None
    return find_thresholds(checkpoint, folder.load(request.calibration), request.allocation, state)

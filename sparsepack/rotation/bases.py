"""The kinds of bases, a row each. A new one is a row here, its name in `options.BASES`, and a file with `bases`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparsepack.calibration.folder import Calibration
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.checkpoint.bases import Bases
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.rotation.options import RotateOptions
from sparsepack.workers.resume import ResumeState


@dataclass(frozen=True)
class Basis:
    """A kind of basis.

    module -- what finds it, by two functions. `check_model(checkpoint)` raises `RotationError` for a model that has no
              such basis. `bases(checkpoint, calibration, options, resume)` returns the `Bases` of its segments,
              float64 on the CPU; what takes long may keep its way in parts of the state `resume`, of any name but
              "blocks"
    needs  -- what the calibration must have for it besides its text: nothing, or the second moments of the stream
    suits  -- whether a format's artifacts lose less in it
    why    -- a clause for people: what it does for these
    trains -- whether it trains on the model's output, and holds the whole model
    """

    module: str
    needs: Literal["nothing", "moments"]
    suits: Callable[[Format], bool]
    why: str
    trains: bool = False

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `RotationError` for a model that has no such basis."""
        self._implementation.check_model(checkpoint)

    def find(
        self, checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions, resume: ResumeState
    ) -> Bases:
        """The bases of a model's segments."""
        found: Bases = self._implementation.bases(checkpoint, calibration, options, resume)
        return found

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of the formats that it suits."""
        return tuple(name for name, format in FORMATS.items() if self.suits(format))

    @property
    def _implementation(self) -> Any:
        return importlib.import_module(self.module)


ROTATIONS: Mapping[str, Basis] = {
    "pca": Basis(
        "sparsepack.rotation.pca",
        "moments",
        lambda format: format.thresholds,
        "channels differ as far as they can, so that skipping the small ones loses less",
    ),
    "hadamard": Basis(
        "sparsepack.rotation.hadamard",
        "nothing",
        lambda format: format.weight_sparsity and format.matrices in ("I8", "F8_E4M3"),
        "channels are even, so that rounding their inputs to 8 bits loses less",
    ),
    "learnt": Basis(
        "sparsepack.rotation.learnt",
        "moments",
        lambda format: format.thresholds,
        "its output changes least where small channels are skipped",
        trains=True,
    ),
}
"""Each basis stands under its name; `options.BASES` lists the names."""

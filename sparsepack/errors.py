"""Mistakes of a user, as exceptions: each message is one line saying what, where, expected, remedy."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake of the user's. The command line prints the message on one line and exits 2."""


class CheckpointError(UserError):
    """The source model cannot be read or is not understood."""


class TextError(UserError):
    """Calibration or evaluation text that cannot be used."""


class CalibrationError(UserError):
    """A calibration folder that is damaged, or belongs to another model."""


class SiteError(UserError):
    """A pattern of site names that matches nothing, or leaves nothing."""


class PruningError(UserError):
    """A model that cannot be pruned."""


class RotationError(UserError):
    """A model that cannot be rotated."""


class DistillationError(UserError):
    """A model that cannot be distilled."""


class SingularError(UserError):
    """Inputs of a matrix that do not say enough of it: their products have no inverse."""


class ThresholdsError(UserError):
    """A thresholds table that is damaged, out of range, or belongs to another model."""


class PlacementError(UserError):
    """A trace of active neurons that is damaged or of another model, or a placement that cannot be made."""


class ArtifactError(UserError):
    """A packed file that is damaged, unknown, or lacks what a command needs."""


class PackingError(UserError):
    """A model that cannot be packed."""


class OutputError(UserError):
    """An output that exists already or cannot be written."""


class RecipeError(UserError):
    """A recipe that does not fit the schema."""


class WorkersError(UserError):
    """Workers that do not fit together, or are too many or too few."""


class WorkerLost(Exception):
    """Another worker ended before the work was done. The command line prints the message on one line and exits 1."""


@contextmanager
def requires_extra(extra: str, purpose: str) -> Iterator[None]:
    """Import what only an extra of the package installs, within `with requires_extra("plot", "--plot"):`.

    Raises `UserError` with pip's command for a module that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("sparsepack"):
            raise
        raise UserError(
            f"{purpose} needs {error.name}, which is not installed: pip install 'sparsepack[{extra}]'"
        ) from error

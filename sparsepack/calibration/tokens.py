"""What a calibration knows of reading few tokens: what attention would miss."""

from fractions import Fraction
from typing import Any

from sparsepack.calibration.collectors.missed import SHARES
from sparsepack.calibration.folder import Calibration
from sparsepack.errors import CalibrationError

MEASURED = tuple(Fraction(1, share) for share in SHARES)
"""`missed` has a figure for each of these shares of the tokens."""


def missed(calibration: Calibration) -> tuple[tuple[float, ...], ...]:
    """For every layer and each share in `MEASURED`: the share of attention weight that the other tokens have, where the
    best ones are read (`collectors.missed`). Raises `CalibrationError` for sums that are no means of shares."""
    return tuple(_of_layer(calibration, layer) for layer in range(len(calibration.layers)))


def token_report(calibration: Calibration) -> dict[str, Any]:
    """What `missed` gives, JSON-able: `shares` as text, and of each of `layers` what is `missed`. Raises as `missed`
    does."""
    layers = [{"missed": list(lost)} for lost in missed(calibration)]
    return {"shares": [str(share) for share in MEASURED], "layers": layers}


def _of_layer(calibration: Calibration, layer: int) -> tuple[float, ...]:
    sums, positions = (calibration.layers[layer][f"attention.{name}"] for name in ("missed", "missed_positions"))
    if not bool((positions > 0).all()) or not bool((sums.abs() <= positions * (1 + 1e-6)).all()):
        raise CalibrationError(
            f"the calibration of {calibration.manifest['model']['name']}: attention.missed of block {layer} is no mean "
            "of shares; calibrate again"
        )
    return tuple((sums / positions).tolist())

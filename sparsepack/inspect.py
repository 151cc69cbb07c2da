"""`inspect`: what anything that sparsepack makes holds."""

from pathlib import Path
from typing import Any

from sparsepack.errors import CalibrationError


def inspect(path: Path) -> dict[str, Any]:
    """What a calibration folder, a thresholds table or an artifact holds, JSON-able.

    `kind` says which it is: "calibration" (its manifest, and `attention_channels`: `calibrate.channel_report`, or why
    there is none), "thresholds" (the table without its vectors), or the format of an artifact
    (`artifacts.inspect.describe`). Raises `UserError` subclasses for what is damaged or not ours.
    """
    from sparsepack.artifacts.open import is_artifact

    if path.is_dir() and not is_artifact(path):
        return _inspect_calibration(path)
    if path.suffix == ".json":
        from sparsepack.sparsity.thresholds import read_thresholds

        return read_thresholds(path).summary()
    from sparsepack.artifacts.inspect import describe

    return describe(path)


def _inspect_calibration(path: Path) -> dict[str, Any]:
    from sparsepack.calibrate import folder
    from sparsepack.calibrate.channel_report import channel_report
    from sparsepack.calibrate.channels import importance

    calibration = folder.load(path)
    try:
        channels: dict[str, Any] | str = channel_report(importance(calibration))
    except CalibrationError as error:
        channels = str(error)
    return {**calibration.manifest, "attention_channels": channels}

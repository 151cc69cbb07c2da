"""`inspect`: what anything that sparsepack makes holds."""

from pathlib import Path
from typing import Any


def inspect(path: Path) -> dict[str, Any]:
    """What a calibration folder, a thresholds table or an artifact holds, JSON-able.

    `kind` says which it is: "calibration" (its manifest), "thresholds" (the table without its vectors), or the format
    of an artifact (`artifacts.inspect.describe`). Raises `UserError` subclasses for what is damaged or not ours.
    """
    from sparsepack.artifacts.open import is_artifact

    if path.is_dir() and not is_artifact(path):
        from sparsepack.calibrate import folder

        return folder.load(path).manifest
    if path.suffix == ".json":
        from sparsepack.sparsity.thresholds import read_thresholds

        return read_thresholds(path).summary()
    from sparsepack.artifacts.inspect import describe

    return describe(path)

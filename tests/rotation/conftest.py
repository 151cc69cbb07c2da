"""The models and calibrations that these tests share."""

from pathlib import Path

import pytest
from calibrated_models import silu, silu_calibration, small, small_calibration, text, tiny, tiny_calibration

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint

__all__ = ["silu", "silu_calibration", "small", "small_calibration", "text", "tiny", "tiny_calibration"]


@pytest.fixture(scope="session")
def tiny_calibrated(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a calibration of the shipped model; not to be changed."""
    made = tmp_path_factory.mktemp("cal") / "c"
    calibrate(tiny, read_text("shipped:train"), made, CalibrateOptions(context=128, samples=8))
    return made

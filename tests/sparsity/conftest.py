"""The models and calibrations that these tests share; what compares engines is the runtime's."""

import sys
from pathlib import Path

from calibrated_models import silu, silu_calibration, small, small_calibration, text, tiny, tiny_calibration

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

__all__ = ["silu", "silu_calibration", "small", "small_calibration", "text", "tiny", "tiny_calibration"]

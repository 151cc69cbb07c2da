"""The models and calibrations that these tests share."""

from calibrated_models import silu, silu_calibration, small, small_calibration, text, tiny, tiny_calibration

__all__ = ["silu", "silu_calibration", "small", "small_calibration", "text", "tiny", "tiny_calibration"]

"""The models and calibrations that these tests share."""

from brief_search import orders_are_searched_briefly
from calibrated_models import silu, silu_calibration, small, small_calibration, text, tiny, tiny_calibration

__all__ = [
    "orders_are_searched_briefly",
    "silu",
    "silu_calibration",
    "small",
    "small_calibration",
    "text",
    "tiny",
    "tiny_calibration",
]

"""What a calibration is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.errors import CalibrationError

CRITERIA = ("magnitude", "column-norm")
"""The criteria whose scores are counted; see `calibrate.criteria`."""


@dataclass(frozen=True)
class CalibrateOptions:
    """How much text, and how it is run.

    context -- tokens per window (None: 2048, or what the model was made for if that is less)
    samples -- windows drawn at random with `seed`, as `models.windows.drawn_windows` says (0: all, in order)
    sinks   -- first positions of each window left out of the statistics (attention sinks)
    batch   -- windows at a time;  device, dtype -- where and in what precision the blocks run
    """

    context: int | None = None
    samples: int = 128
    seed: int = 0
    sinks: int = 4
    batch: int = 2
    device: str = "cpu"
    dtype: str = "float32"

    def check(self) -> None:
        """Raise `CalibrationError` for values that make no sense."""
        fits = self.context is None or self.context > self.sinks
        if not fits or self.sinks < 0 or self.samples < 0 or self.batch < 1:
            raise CalibrationError(
                f"context {self.context}, sinks {self.sinks}, samples {self.samples}, batch {self.batch}: expected "
                "context > sinks >= 0, samples >= 0 and batch >= 1"
            )

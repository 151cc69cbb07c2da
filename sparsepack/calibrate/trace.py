"""The options of a trace. Nothing heavy is imported here: the command line reads the defaults."""

from dataclasses import dataclass

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import PlacementError
from sparsepack.option import check_options, option

MANIFEST = "trace.json"
"""A folder with this file is a trace."""


@dataclass(frozen=True)
class TraceOptions:
    """How many sessions, how long, and who counts as active."""

    sessions: int = option(
        "Stretches of text, one from the middle of each of so many documents; where the text has fewer that are long "
        "enough, evenly spread over the text as a whole.",
        default=12,
        least=1,
        most=100_000,
    )
    tokens: int = option("Tokens of a session.", default=2048, least=2)
    prompt: int = option("Its first tokens: they are known before anything is decoded.", default=256, least=0)
    share: float | None = option(
        "For models whose neurons are never exactly zero: the share of the neurons that counts as active, by a "
        "threshold for each block that has it on the text of --calibration (default: all that are not zero).",
        default=None,
        above=0,
        below=1,
    )
    batch: int = option("Sessions at a time.", default=2, least=1)
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `PlacementError` for values that make no sense."""
        check_options(self, PlacementError)
        if self.prompt >= self.tokens - 1:
            raise PlacementError(
                f"prompt {self.prompt}, tokens {self.tokens}: nothing would be decoded; expected prompt < tokens - 1"
            )

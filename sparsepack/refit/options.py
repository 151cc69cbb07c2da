"""The options of `pack` that fit weights to their inputs. Nothing heavy is imported here: the command line and recipes
read the defaults."""

from dataclasses import dataclass

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.errors import PackingError
from sparsepack.option import check_options, only_with, option

QUANTISERS = ("round", "gptq")
FITS = only_with("refit", others=(only_with("quantiser", *QUANTISERS[1:]),))
"""Holds where anything is to be fitted."""


@dataclass(frozen=True)
class RefitOptions:
    """How the weights of the blocks come to be what is stored."""

    refit: bool = option(
        "Fit the weights anew to the sparse inputs that they will meet, site by site on calibration text.",
        default=False,
    )
    quantiser: str = option(
        "Round each weight to the nearest value, or let weights that are rounded later make up for the errors of the "
        "others on calibration text (GPTQ).",
        default="round",
        choices=QUANTISERS,
    )
    refit_windows: int = option("Calibration windows that weights are fitted on.", default=128, least=1, counts=(FITS,))
    refit_dense: float = option(
        "Share of dense inputs, those of a prompt, among the inputs that weights are fitted to.",
        default=0.7,
        least=0,
        below=1,
        counts=(only_with("refit"),),
    )
    damping: float = option(
        "What is added to the inputs' second moments, as a share of their mean: the more, the less weights change.",
        default=0.05,
        above=0,
        most=1,
        counts=(FITS,),
    )
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    @property
    def fits(self) -> bool:
        """Whether anything is to be fitted."""
        return self.refit or self.quantiser != QUANTISERS[0]

    def check(self) -> None:
        """Raise `PackingError` for values out of range."""
        check_options(self, PackingError)

"""The options of `pack` that fit weights to their inputs. Nothing heavy is imported here: the command line and recipes
read the defaults."""

from dataclasses import dataclass, replace

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import PackingError
from sparsepack.option import check_options, only_with, option

QUANTISERS = ("auto", "round", "gptq")
FITS = only_with("refit", others=(only_with("quantiser", "auto", "gptq"),))
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
        "others on calibration text (GPTQ: error feedback); auto: gptq wherever a calibration is given.",
        default="auto",
        choices=QUANTISERS,
    )
    refit_windows: int | None = option(
        "Calibration windows that weights are fitted on; gptq alone reads 512 tokens of each (default: three tokens "
        "for each input of the widest site; on a GPU and with --refit 128 windows at least).",
        default=None,
        least=1,
        counts=(FITS,),
    )
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
        counts=(only_with("refit"),),
    )
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    @property
    def fits(self) -> bool:
        """Whether anything is to be fitted, once `auto` is decided."""
        return self.refit or self.quantiser == "gptq"

    def decided(self, calibrated: bool) -> "RefitOptions":
        """The options with a quantiser in place of `auto`: error feedback where there is a calibration."""
        return self if self.quantiser != "auto" else replace(self, quantiser="gptq" if calibrated else "round")

    def check(self) -> None:
        """Raise `PackingError` for values out of range."""
        check_options(self, PackingError)

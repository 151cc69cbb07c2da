"""A figure over windows with its standard error: computed, and as people read it."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 1e9
"""Larger figures are shown by powers of ten: the perplexity of a broken model may have hundreds of digits."""


def mean(values: "Tensor") -> dict[str, float | None]:
    """The mean of one value per window, and its error; None of a single window."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
    return {"value": float(values.mean()), "stderr": error}


def exp_mean(values: "Tensor") -> dict[str, float | None]:
    """exp of the mean, and its error: exp(mean) * error of the mean; infinity, without one, beyond any number."""
    of = mean(values)
    try:
        value = math.exp(float(values.mean()))
    except OverflowError:
        return {"value": math.inf, "stderr": None}
    return {"value": value, "stderr": None if of["stderr"] is None else value * of["stderr"]}


def with_error(figure: Mapping[str, float | None], digits: int) -> str:
    """`15.430 ± 0.210`; without the error where a single window gives none, `-` where there is no number at all, and
    `1.2e+09` where it would take more than nine digits."""
    value, error = figure["value"], figure.get("stderr")
    if value is None:
        return "-"
    kind = "f" if abs(value) < _MOST else "e"
    return f"{value:.{digits}{kind}}" + ("" if error is None else f" ± {error:.{digits}{kind}}")

"""How far a result is from the one that was expected, and the end of a benchmark where that is too far."""

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what was expected, in the type of the two."""
    return float((found - expected).norm() / expected.norm())


def expect_near(what: str, error: float, limit: float) -> float:
    """Return the error of a result. Raises `RuntimeError` where it is above the limit, or is no number: what computes
    something else is not timed."""
    if not error <= limit:
        raise RuntimeError(f"{what}: wrong by {error:.3g}, expected at most {limit:.3g}; not timed")
    return error

"""A figure as people read it."""

import pytest

from sparsepack.eval.standard_error import with_error


@pytest.mark.parametrize(
    ("value", "stderr", "shown"), [(1.5, 0.25, "1.50 ± 0.25"), (1.5, None, "1.50"), (None, None, "-")]
)
def test_what_is_not_known_is_left_out(value: float | None, stderr: float | None, shown: str) -> None:
    """lm-eval gives no number where a metric has none; a table of the others must still be printed."""
    assert with_error({"value": value, "stderr": stderr}, 2) == shown

"""A figure as people read it."""

import math

import pytest
import torch

from sparsepack.eval.results import exp_mean, with_error


@pytest.mark.parametrize(
    ("value", "stderr", "shown"),
    [
        (1.5, 0.25, "1.50 ± 0.25"),
        (1.5, None, "1.50"),
        (None, None, "-"),
        (2.764e197, 6.04e196, "2.76e+197 ± 6.04e+196"),
    ],
)
def test_what_is_not_known_is_left_out(value: float | None, stderr: float | None, shown: str) -> None:
    """lm-eval gives no number where a metric has none; a table of the others must still be printed."""
    assert with_error({"value": value, "stderr": stderr}, 2) == shown


def test_a_model_that_knows_nothing_has_a_perplexity_too() -> None:
    found = exp_mean(torch.tensor([800.0, 900.0], dtype=torch.float64))
    assert found == {"value": math.inf, "stderr": None}
    assert with_error(found, 2) == "inf"

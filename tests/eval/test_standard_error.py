"""A figure as people read it."""

import math

import pytest
import torch

from sparsepack.eval.results import exp_mean, mean, with_error


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


def test_the_error_of_a_mean_is_the_deviation_over_the_root_of_the_number() -> None:
    values = torch.tensor([1.0, 3.0] * 8, dtype=torch.float64)
    found = mean(values)
    assert found == {"value": 2.0, "stderr": pytest.approx(math.sqrt(16 / 15) / 4)}
    assert exp_mean(values)["stderr"] == pytest.approx(math.exp(2) * math.sqrt(16 / 15) / 4)
    assert mean(values[:1]) == {"value": 1.0, "stderr": None}

"""What may be asked for, and how much each site counts."""

from dataclasses import replace

import pytest
import torch

from sparsepack.calibrate import teal
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import CalibrationError, ThresholdsError
from sparsepack.models.family import SITES
from sparsepack.models.sites import SiteRule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0: expected at least 0 and below 1"),
        ({"sparsity": -0.1}, r"sparsity -0\.1"),
        ({"sparsity": 50}, "sparsity 50"),
        ({"sparsity": float("nan")}, "sparsity nan"),
        ({"allocation": "greedy"}, "'greedy': expected one of fisher, uniform, teal, global"),
        ({"allocation": "uniform", "criterion": "wina"}, "'wina': expected one of magnitude, column-norm"),
        ({"upstream": "wet"}, "'wet': expected one of sparse, dense"),
        ({"windows": 0}, "windows 0: expected at least 1"),
        ({"allocation": "global", "steps": 0}, "steps 0"),
        ({"allocation": "global", "batch": 0}, "batch 0"),
        ({"allocation": "global", "length": 1}, "length 1: expected at least 2"),
        ({"offsets": True}, "it is for allocation global, not fisher"),
        ({"allocation": "global", "upstream": "dense"}, "global runs the whole sparse model; expected sparse"),
        ({"criterion": "column-norm"}, "criterion column-norm: it does nothing with allocation fisher"),
    ],
)
def test_an_option_out_of_range_is_one_line(small, small_calibration, changes, message):
    options = replace(AllocationOptions(0.5), **changes)
    with pytest.raises(ThresholdsError, match=message) as caught:
        find_thresholds(small, small_calibration, options)
    assert "\n" not in str(caught.value)


def test_a_calibration_of_another_model_gives_no_thresholds(tiny, small_calibration):
    with pytest.raises(CalibrationError, match="calibrate this model"):
        find_thresholds(tiny, small_calibration, AllocationOptions(0.5))


def test_weights_are_shares_of_the_parameters(small):
    """Qwen2 of hidden 256, 4 heads of 64, 2 of keys and values, FFN 512."""
    sizes = {"attn_in": 256 * (256 + 128 + 128), "attn_out": 256 * 256, "mlp_in": 256 * 1024, "mlp_mid": 512 * 256}
    sites = [(0, "attn_in"), (0, "attn_out"), (2, "mlp_in"), (1, "mlp_mid")]
    weights = weights_of(small, sites)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights == {key: pytest.approx(sizes[key[1]] / sum(sizes.values())) for key in sites}


def test_every_step_of_teal_skips_as_many_parameters(small, monkeypatch):
    """Whatever the size of the site that takes it."""
    weights = weights_of(small, [(0, site) for site in SITES])
    monkeypatch.setattr(teal, "run_at", lambda stream, layer, hidden, sparsities, base: torch.zeros(1, 4, 2))
    steps = []

    def each(trials, error):
        steps.append([sum(tried[site] * weights[0, site] for site in SITES) / total for _, tried in trials])
        return [error(trial) for trial in trials]

    total = sum(weights.values())
    teal.greedy_sparsities(None, 0, None, weights, 0.1, dict.fromkeys(SITES, SiteRule()), each)
    assert len(steps) == 4
    for number, step in enumerate(steps, 1):
        assert step == [pytest.approx(number * teal.STEP)] * len(SITES)

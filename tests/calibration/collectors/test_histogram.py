"""Streaming histograms: exact counts, and quantiles within a tenth of a point."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.calibrate import histogram


def _samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(200_000, generator=generator)
    student = torch.distributions.StudentT(2.0)
    torch.manual_seed(3)
    return {
        "normal": normal.abs(),
        "normal 1e-9": 1e-9 * normal.abs(),
        "normal 1e5": 1e5 * normal.abs(),
        "student t 2": student.sample((200_000,)).abs(),
        "uniform": torch.rand(200_000, generator=generator),
        "half zero": torch.relu(normal),
        "narrow": 1 + 0.05 * normal.abs(),
    }


SAMPLES = _samples()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.4, 0.5, 0.65, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_quantile_is_within_a_tenth_of_a_point(name, share):
    values = SAMPLES[name]
    threshold = histogram.quantile(histogram.count(values), share)
    realised = float((values <= threshold).double().mean())
    zeros = float((values == 0).double().mean())
    assert abs(realised - max(share, zeros)) < 0.001


@pytest.mark.parametrize("name", SAMPLES)
def test_the_share_at_most_inverts_the_quantile(name):
    counts = histogram.count(SAMPLES[name])
    for share in (0.6, 0.9):
        assert histogram.share_at_most(counts, histogram.quantile(counts, share)) == pytest.approx(share, abs=1e-6)


def test_counts_of_parts_add_up_to_the_whole():
    values = torch.cat(list(SAMPLES.values()))
    whole = histogram.count(values)
    parts = sum(histogram.count(part) for part in values[torch.randperm(len(values))].split(77_777))
    assert torch.equal(whole, parts)
    assert int(whole.sum()) == len(values)
    assert torch.equal(histogram.count(values.view(-1, 100).t()), whole)


@given(st.lists(st.floats(0, width=32, allow_infinity=True, allow_subnormal=False), min_size=1, max_size=50))
def test_every_value_is_counted_in_the_bin_that_holds_it(values):
    edges = histogram.edges()
    expected = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, histogram.BINS - 1)
    expected = np.where((np.array(values) > 0) & (expected == 0), 1, expected)  # tiny ones are not zeros
    counts = histogram.count(torch.tensor(values, dtype=torch.float32))
    assert counts.tolist() == np.bincount(expected, minlength=histogram.BINS).tolist()


def test_below_the_share_of_zeros_a_quantile_is_zero_and_above_it_is_not():
    values = torch.cat([torch.zeros(700), torch.linspace(1, 2, 300)])
    counts = histogram.count(values)
    assert [histogram.quantile(counts, share) for share in (0.0, 0.3, 0.5, 0.7)] == [0.0] * 4
    assert histogram.share_at_most(counts, 0.0) == 0.7
    above = histogram.quantile(counts, 0.75)
    assert float((values <= above).double().mean()) == pytest.approx(0.75, abs=0.001)


def test_nothing_and_only_zeros_have_the_quantile_zero():
    assert histogram.quantile(torch.zeros(histogram.BINS, dtype=torch.int64), 0.5) == 0.0
    assert histogram.share_at_most(torch.zeros(histogram.BINS, dtype=torch.int64), 1.0) == 0.0
    assert histogram.quantile(histogram.count(torch.zeros(10)), 0.99) == 0.0


def test_values_beyond_all_bins_are_counted_at_the_ends():
    counts = histogram.count(torch.tensor([1e-38, 1e-30, 1.0, 1e30, torch.inf]))
    assert int(counts[0]) == 0
    assert int(counts[1]) == 2
    assert int(counts[-1]) == 2
    assert np.isfinite(histogram.quantile(counts, 0.999))


def test_a_threshold_on_equal_values_drops_all_of_them_or_none():
    counts = histogram.count(torch.full((100,), 0.75))
    assert histogram.quantile(counts, 0.5) >= 0.75
    assert histogram.share_at_most(counts, 0.5) == 0.0


def test_bins_are_narrower_than_half_a_percent():
    edges = histogram.edges()
    assert edges[0] == 0
    assert np.all(np.diff(edges) > 0)
    assert np.max(edges[2:] / edges[1:-1]) <= 1 + 1 / 256

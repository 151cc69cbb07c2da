"""Slots given out: prefixes of the order by frequency, within the budget, and never fewer for more of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparsepack.errors import PlacementError
from sparsepack.placement.placement import across_blocks, budget_of, same_share

FREQUENCIES = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 5), st.integers(1, 12)), elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
)
BOTH = pytest.mark.parametrize("place", [across_blocks, same_share])


@BOTH
@given(frequency=FREQUENCIES, budget=st.integers(0, 300), record=st.integers(1, 7))
def test_in_each_block_they_are_a_prefix_of_the_order_by_falling_frequency(place, frequency, budget, record):
    found = place(frequency, budget, record)
    for row, frequencies, count in zip(found.resident, frequency, found.slots, strict=True):
        order = np.argsort(-frequencies, kind="stable")
        assert row[order[:count]].all()
        assert not row[order[count:]].any()


@BOTH
@given(frequency=FREQUENCIES, budget=st.integers(0, 300), record=st.integers(1, 7))
def test_they_take_no_more_than_the_budget_and_no_more_than_all_neurons_need(place, frequency, budget, record):
    found = place(frequency, budget, record)
    assert found.bytes == int(found.resident.sum()) * record <= min(budget, frequency.size * record)
    unused = budget - found.bytes
    assert found.share == 1 or unused < record * (1 if place is across_blocks else len(frequency))


@BOTH
@given(frequency=FREQUENCIES, budget=st.integers(0, 100), more=st.integers(0, 100), record=st.integers(1, 7))
def test_a_larger_budget_keeps_every_slot(place, frequency, budget, more, record):
    small, large = place(frequency, budget, record), place(frequency, budget + more, record)
    assert not (small.resident & ~large.resident).any()


@given(frequency=FREQUENCIES, budget=st.integers(0, 60))
def test_across_blocks_no_neuron_with_a_slot_is_less_frequent_than_one_without(frequency, budget):
    resident = across_blocks(frequency, budget).resident
    if resident.any() and not resident.all():
        assert frequency[resident].min() >= frequency[~resident].max()


def test_blocks_that_are_hardly_used_get_no_slots():
    frequency = np.array([[0.5, 0.4, 0.3], [0.2, 0.1, 0.1]])
    assert across_blocks(frequency, 3).slots == (3, 0)
    assert same_share(frequency, 3).slots == (1, 1)
    assert across_blocks(frequency, budget_of(0.5, frequency, 8), 8).slots == (3, 0)


def test_a_placement_does_not_change():
    with pytest.raises(ValueError, match="read-only"):
        across_blocks(np.ones((1, 2)), 1).resident[0, 0] = False


@pytest.mark.parametrize(("budget", "record"), [(-1, 1), (5, 0)])
def test_a_budget_that_is_none_is_refused(budget, record):
    with pytest.raises(PlacementError, match="expected at least 0"):
        across_blocks(np.ones((1, 2)), budget, record)

"""The two ways to choose who stays, against plain sorting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.placement.placement import best, swaps

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 3e7]), min_size=1, max_size=9)


def swapped(score, resident, margin):
    """Who is resident after all swaps."""
    coming, going = swaps(score, resident, margin)
    assert resident[going].all()
    assert not resident[coming].any()
    after = resident.copy()
    after[coming], after[going] = True, False
    return after


@st.composite
def groups(draw):
    """Scores [groups, units], who is there, and how many may."""
    units, count = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rows = [
        draw(st.lists(st.sampled_from([0.0, 0.5, 0.75, 3e7]), min_size=units, max_size=units)) for _ in range(count)
    ]
    there = [draw(st.lists(st.booleans(), min_size=units, max_size=units)) for _ in range(count)]
    slots = draw(st.lists(st.integers(0, units), min_size=count, max_size=count))
    return np.array(rows, np.float32), np.array(there), np.array(slots)


@given(groups())
def test_the_best_are_those_with_the_highest_scores_then_who_is_there_then_the_first(case):
    score, resident, slots = case
    found = best(score, resident, slots)
    for row, scores, there, count in zip(found, score, resident, slots, strict=True):
        order = sorted(range(len(scores)), key=lambda unit: (-scores[unit], not there[unit], unit))
        assert np.flatnonzero(row).tolist() == sorted(order[:count])


@given(groups())
def test_swaps_without_a_margin_lead_to_scores_that_no_swap_betters(case):
    score, resident, _ = (each[0] for each in case)
    after = swapped(score, resident, 0)
    assert after.sum() == resident.sum()
    assert (
        np.sort(score[after]).tolist()
        == np.sort(score[best(score[None], resident[None], [resident.sum()])[0]]).tolist()
    )


@given(groups(), st.sampled_from([0.0, 0.1, 0.5, 10.0]))
def test_each_swap_gains_more_than_the_margin(case, margin):
    score, resident, _ = (each[0] for each in case)
    after = swapped(score, resident, margin)
    came, went = np.sort(score[after & ~resident])[::-1], np.sort(score[resident & ~after])
    assert len(came) == len(went)
    assert (came > went + np.float32(margin)).all()


@given(groups(), st.sampled_from([0.0, 0.1, 0.25, 10.0]))
def test_swaps_are_those_of_sorting_everyone(case, margin):
    score, resident, _ = (each[0] for each in case)
    order = sorted(range(len(score)), key=lambda unit: (-score[unit], unit))
    coming = [unit for unit in order if not resident[unit]]
    going = [unit for unit in reversed(order) if resident[unit]]
    expected = resident.copy()
    for come, go in zip(coming, going, strict=False):
        if not score[come] > score[go] + np.float32(margin):
            break
        expected[come], expected[go] = True, False
    assert swapped(score, resident, margin).tolist() == expected.tolist()


def test_the_swap_that_gains_most_is_the_first():
    score = np.array([0.3, 0.1, 0.2, 0.7, 0.9, 0.8], np.float32)
    coming, going = swaps(score, np.arange(6) < 3, 0.0)
    assert (coming.tolist(), going.tolist()) == ([4, 5, 3], [1, 2, 0])


def test_with_a_margin_no_pair_is_left_that_gains_more():
    score = np.array([0.5, 0.6, 0.1, 0.9], np.float32)
    resident = np.array([True, True, False, False])
    assert swapped(score, resident, 0.05).tolist() == [False, True, False, True]
    assert swapped(score, resident, 0.5).tolist() == [True, True, False, False]

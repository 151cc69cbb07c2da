"""The table of slots: whatever moves, and wherever it is interrupted, a slot has the neuron that the table names."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.runtime.hybrid import residency as module
from sparsepack.runtime.hybrid.residency import NOWHERE, Residency, ranges_of_blocks

SHAPE = (3, 40)
seeds = st.integers(0, 2**32 - 1)


class Slots:
    """What lies in the slots; stops after so many copies."""

    def __init__(self, residency: Residency, until: int = 1 << 30) -> None:
        self.residency, self.left = residency, until
        self.content = np.full((residency.slots, 2), NOWHERE)

    def copy(self, neurons: np.ndarray, slots: np.ndarray) -> None:
        assert (np.diff(neurons) > 0).all()
        for neuron, slot in zip(neurons, slots, strict=True):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            self.content[slot] = divmod(neuron, SHAPE[1])

    def check(self) -> None:
        where = np.argwhere(self.residency.table != NOWHERE)
        slots = self.residency.table[tuple(where.T)]
        assert len(set(slots.tolist())) == len(slots)
        assert np.array_equal(self.content[slots], where)


def chosen(seed: int, most: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    resident = np.zeros(SHAPE, np.bool_)
    resident.ravel()[generator.permutation(resident.size)[: generator.integers(most + 1)]] = True
    return resident


@given(most=st.integers(0, 120), spare=st.sampled_from([1, 5, 64]), history=st.lists(seeds, max_size=6))
def test_those_have_slots_who_shall(most: int, spare: int, history: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "spare_of", lambda slots: spare)
        residency = Residency(SHAPE, most)
        slots = Slots(residency)
        for seed in history:
            wanted = chosen(seed, most)
            residency.change(wanted, slots.copy)
            assert np.array_equal(residency.resident, wanted)
            slots.check()
        start = chosen(0, most)
        residency.restart(start, slots.copy)
        slots.check()
        fresh = Residency(SHAPE, most)
        fresh.restart(start, Slots(fresh).copy)
        assert np.array_equal(residency.table, fresh.table)


@given(first=seeds, second=seeds, until=st.integers(0, 90), again=st.booleans())
def test_an_interrupted_change_leaves_a_true_table(first: int, second: int, until: int, again: bool) -> None:
    residency = Residency(SHAPE, 60)
    slots = Slots(residency)
    residency.restart(chosen(first, 60), slots.copy)
    slots.left = until
    change = residency.restart if again else residency.change
    try:
        change(chosen(second, 60), slots.copy)
    except KeyboardInterrupt:
        slots.check()
    slots.left = 1 << 30
    residency.change(chosen(second, 60), slots.copy)
    assert np.array_equal(residency.resident, chosen(second, 60))
    slots.check()


def test_nothing_is_copied_where_nothing_changed() -> None:
    residency = Residency(SHAPE, 60)
    slots = Slots(residency)
    residency.restart(chosen(1, 60), slots.copy)
    slots.left = 0
    residency.restart(chosen(1, 60), slots.copy)
    residency.change(chosen(1, 60), slots.copy)


def test_more_neurons_than_slots_are_refused() -> None:
    residency = Residency(SHAPE, 3)
    with pytest.raises(ValueError, match="4 neurons for 3 slots"):
        residency.change(
            np.eye(*SHAPE, dtype=np.bool_) | (np.arange(40) == 39) & (np.arange(3)[:, None] == 0), Slots(residency).copy
        )


def test_moves_are_those_of_the_whole_change() -> None:
    one, other = Residency(SHAPE, 60), Residency(SHAPE, 60)
    now = np.zeros(SHAPE, np.bool_)
    for seed in range(20):
        wanted = chosen(seed, 60)
        coming, going = (np.flatnonzero(each).astype(np.int32) for each in (wanted & ~now, now & ~wanted))
        one.move(coming, going, Slots(one).copy)
        other.change(wanted, Slots(other).copy)
        now = wanted
        assert np.array_equal(one.table, other.table)


@given(st.lists(st.integers(0, 119), unique=True).map(sorted))
def test_ranges_of_blocks_are_those_of_each_block(neurons: list[int]) -> None:
    found = list(ranges_of_blocks(np.array(neurons, np.int32), 40))
    assert [n for block, first, last in found for n in neurons[first:last] if n // 40 == block] == neurons
    assert len({block for block, _, _ in found}) == len(found) == len({n // 40 for n in neurons})


@given(spare=st.sampled_from([1, 5, 64]), seeds=st.lists(seeds, min_size=2, max_size=8), vain=st.booleans())
def test_what_was_prepared_is_what_moves_do_at_once(spare: int, seeds: list[int], vain: bool) -> None:
    """Or in vain: then something else moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "spare_of", lambda slots: spare)
        one, other = Residency(SHAPE, 60), Residency(SHAPE, 60)
        slots, at_once = Slots(one), Slots(other)
        now = np.zeros(SHAPE, np.bool_)
        for first, wanted in pairwise(seeds):
            for seed in (first, wanted) if vain else (wanted,):
                after = chosen(seed, 60)
                coming, going = (np.flatnonzero(each).astype(np.int32) for each in (after & ~now, now & ~after))
                before = one.table.copy()
                one.prepare(coming, going, slots.copy)
                assert np.array_equal(one.table, before)
                slots.check()
            one.move(coming, going, slots.copy)
            other.move(coming, going, at_once.copy)
            slots.check()
            assert np.array_equal(one.table, other.table)
            now = after


def test_prepared_moves_are_not_copied_again() -> None:
    residency = Residency(SHAPE, 60)
    slots = Slots(residency)
    residency.restart(chosen(1, 60), slots.copy)
    coming, going = (np.flatnonzero(~residency.resident)[:1], np.flatnonzero(residency.resident)[:1])
    residency.prepare(coming.astype(np.int32), going.astype(np.int32), slots.copy)
    slots.left = 0
    residency.move(coming.astype(np.int32), going.astype(np.int32), slots.copy)
    slots.check()


def test_what_was_prepared_for_other_neurons_to_go_is_vain() -> None:
    residency = Residency(SHAPE, 60)
    slots = Slots(residency)
    residency.restart(chosen(1, 60), slots.copy)
    coming = np.flatnonzero(~residency.resident)[:1].astype(np.int32)
    first, other = np.flatnonzero(residency.resident)[:2].astype(np.int32).reshape(2, 1)
    residency.prepare(coming, first, slots.copy)
    residency.move(coming, other, slots.copy)
    assert residency.resident.ravel()[[coming[0], first[0], other[0]]].tolist() == [True, True, False]
    slots.check()

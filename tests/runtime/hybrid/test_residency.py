"""The table of slots: whatever moves, and wherever it is interrupted, a slot has the neuron that the table names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.runtime.hybrid import residency as module
from sparsepack.runtime.hybrid.residency import NOWHERE, Residency

SHAPE = (3, 40)
seeds = st.integers(0, 2**32 - 1)


class Slots:
    """What lies in the slots; stops after so many copies."""

    def __init__(self, residency: Residency, until: int = 1 << 30) -> None:
        self.residency, self.left = residency, until
        self.content = np.full((residency.slots, 2), NOWHERE)

    def copy(self, block: int, neurons: np.ndarray, slots: np.ndarray) -> None:
        for neuron, slot in zip(neurons, slots, strict=True):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            self.content[slot] = block, neuron

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
        patch.setattr(module, "SPARE", spare)
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

"""Token boundaries of a device that computes meanwhile: after each token the slots of one for which we wait."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import skip_without_kernels

from sparsepack.placement.policies import Slow, slow
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.hybrid.policy import KEPT, FollowedNatively, Following, Moves, Played, TokenBoundaries
from sparsepack.runtime.hybrid.residency import Residency

skip_without_kernels()

SHAPE = (2, 90)
SLOTS = 60


class Device:
    """Slots, and a ring of bits; a step that runs reads the table that was in force when it began."""

    def __init__(self) -> None:
        self.residency = Residency(SHAPE, SLOTS)
        self.content = np.full(self.residency.slots, -1)
        self.bits = np.zeros((KEPT, 1, SHAPE[0], -(-SHAPE[1] // 8)), np.uint8)
        self.moved = False  # behind the step that runs
        self.interrupts = False

    def forget(self) -> None: ...

    def place(self, resident: np.ndarray) -> None:
        self.residency.restart(resident, self.copy)

    def prepare(self, moves: Moves) -> None:
        assert not self.moved, "the step that runs still reads the other table"
        self.residency.prepare(moves.coming, moves.going, self.copy)

    def move(self, moves: Moves) -> None:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        self.residency.move(moves.coming, moves.going, self.copy)
        self.moved = True

    def step_bits(self, number: int) -> np.ndarray:
        bits: np.ndarray = self.bits[number % KEPT]
        return bits

    def copy(self, neurons: np.ndarray, slots: np.ndarray) -> None:
        self.content[slots] = neurons

    def begin_step(self) -> np.ndarray:
        """Who has a slot, which the records in the slots confirm."""
        self.moved = False
        resident = self.residency.resident
        assert np.array_equal(self.content[self.residency.table[resident]], np.flatnonzero(resident))
        return resident


def begun(chosen: Slow, native: bool) -> Following:
    generator = np.random.default_rng(7)
    frequency, order = generator.random(SHAPE), np.stack([generator.permutation(SHAPE[1]) for _ in range(SHAPE[0])])
    if native:
        return FollowedNatively(machine.native().SlowPolicy, chosen, frequency, SLOTS, order)
    return Played(slow(chosen), frequency, SLOTS, order)


def some_bits(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Who is active in some tokens of one kind."""
    active = generator.random((tokens, *SHAPE)) < generator.random(SHAPE) ** 2
    return np.packbits(active, axis=2, bitorder="little")


@settings(max_examples=30, deadline=None)
@given(
    every=st.integers(1, 8),
    data=st.data(),
    most=st.sampled_from([None, 1, 4, 64]),
    passes=st.lists(st.sampled_from(["step"] * 8 + ["prompt", "counts", "text"]), max_size=80),
    seed=st.integers(0, 2**31),
)
def test_slots_and_counts_are_those_of_a_device_that_waits(
    every: int, data: st.DataObject, most: int | None, passes: list[str], seed: int
) -> None:
    chosen = Slow(0.5, 0.02, every, data.draw(st.integers(0, every - 1)), most)
    one, other = Device(), Device()
    waits = TokenBoundaries(begun(chosen, native=False), one)
    native = TokenBoundaries(begun(chosen, native=True), other)
    for each in (waits, native):
        each.begin_sequence(lambda: None)
    generator = np.random.default_rng(seed)
    for number, what in enumerate(passes):
        if what == "text":
            waits.begin_sequence(lambda: None)
            native.begin_sequence(lambda: None)
        elif what == "counts":
            assert dataclasses.astuple(waits.counts) == dataclasses.astuple(native.counts)
        else:
            tokens = 1 if what == "step" else 11
            bits = some_bits(generator, tokens)
            assert np.array_equal(one.begin_step(), other.begin_step())
            if what == "step":
                native.meanwhile()
                other.bits[number % KEPT] = bits
                native.end_step(number)
                waits.end_pass(bits, 0)
            else:
                waits.end_pass(bits, tokens)
                native.end_pass(bits, tokens)
    assert waits.counts == native.counts


def test_between_two_tokens_nothing_is_done_for_a_policy_that_foresees() -> None:
    device = Device()
    follows = begun(Slow(0.5, 0.0, every=2, delay=1), native=True)
    boundaries, generator = TokenBoundaries(follows, device), np.random.default_rng(1)
    boundaries.begin_sequence(lambda: None)
    began = time.perf_counter()
    for number in range(20):
        resident = device.begin_step()
        boundaries.meanwhile()
        after = device.residency.resident
        device.bits[number % KEPT] = some_bits(generator, 1)
        boundaries.end_step(number)
        assert np.array_equal(device.residency.resident, after)
        assert np.array_equal(resident, after) == (number < 2 or number % 2 == 1), "moved while the token is computed"
    assert boundaries.counts.moves > 0
    assert 0 < boundaries.seconds < time.perf_counter() - began


def test_after_moves_that_were_interrupted_a_text_begins_anew() -> None:
    device = Device()
    boundaries = TokenBoundaries(begun(Slow(0.5, 0.0, 2, 1), native=True), device)
    first = boundaries.follows.first.copy()
    boundaries.begin_sequence(lambda: None)
    generator = np.random.default_rng(1)

    def step(number: int) -> None:
        device.begin_step()
        boundaries.meanwhile()
        device.bits[number % KEPT] = some_bits(generator, 1)
        boundaries.end_step(number)

    for number in range(8):
        step(number)
    assert not np.array_equal(device.residency.resident, first)
    device.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        for number in range(8, 12):
            step(number)
    boundaries.begin_sequence(lambda: None)
    assert np.array_equal(device.residency.resident, first)
    assert boundaries.counts.tokens == 0

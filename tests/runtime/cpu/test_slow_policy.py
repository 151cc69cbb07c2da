"""The slow policy followed natively, against the one in numpy: the same moves at the same tokens, the same counts."""

import dataclasses
import os
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import forks, skip_without_kernels

from sparsepack.placement.policies import Slow, slow
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.hybrid.policy import FollowedNatively, Following, Played

skip_without_kernels()


def both(
    chosen: Slow, frequency: np.ndarray, slots: int, order: np.ndarray, threads: int = 1
) -> tuple[Following, Following]:
    native = partial(machine.native().SlowPolicy, threads=threads)
    return FollowedNatively(native, chosen, frequency, slots, order), Played(slow(chosen), frequency, slots, order)


def orders(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    return np.stack([generator.permutation(shape[1]) for _ in range(shape[0])])


def same_moves(one: Following, other: Following) -> int:
    """How many neurons come."""
    found, expected = one.moves(), other.moves()
    if expected is None:
        assert found is None
        return 0
    assert found is not None
    assert np.array_equal(found.coming, expected.coming)
    assert np.array_equal(found.going, expected.going)
    return len(found.coming)


def packed(active: np.ndarray) -> np.ndarray:
    """As a GPU has bits, in words of 32."""
    room = np.pad(active, [(0, 0)] * (active.ndim - 1) + [(0, -active.shape[-1] % 32)])
    return np.packbits(room, axis=-1, bitorder="little")


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 150)),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    every=st.integers(1, 20),
    data=st.data(),
    steps=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=25),
    levels=st.sampled_from([1, 2, 1000]),
    margin=st.sampled_from([0.0, 0.02, 0.2, 2.0]),
    most=st.sampled_from([None, 1, 3, 20]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_moves_and_counts_are_those_of_the_policy_in_numpy(
    shape: tuple[int, int],
    share: float,
    every: int,
    data: st.DataObject,
    steps: list[tuple[int, bool]],
    levels: int,
    margin: float,
    most: int | None,
    threads: int,
    seed: int,
) -> None:
    """Frequencies of few levels have many ties."""
    generator = np.random.default_rng(seed)
    delay = data.draw(st.integers(0, every - 1))
    frequency = generator.integers(0, levels, shape) / levels
    chosen = Slow(0.9, margin, every, delay, most)
    native, numpy = both(chosen, frequency, round(share * frequency.size), orders(shape, generator), threads)
    assert np.array_equal(native.first, numpy.first)
    for text in range(2):
        for tokens, is_prompt in steps:
            active = generator.random((tokens, *shape)) < generator.random(shape) ** 3
            for follows in (native, numpy):
                follows.saw(packed(active), tokens if is_prompt else 0)
            same_moves(native, numpy)
        assert native.counts == numpy.counts
        assert text or dataclasses.astuple(native.counts) != (0,) * 5 or all(prompt for _, prompt in steps)
        native.restart()
        numpy.restart()


def test_the_settings_of_the_default_move_neurons_of_several_blocks() -> None:
    generator, shape = np.random.default_rng(4), (8, 1280)
    native, numpy = both(Slow(), generator.random(shape), 3000, orders(shape, generator))
    likely, moved = generator.random(shape) ** 4, 0
    for _ in range(100):
        bits = packed(generator.random((1, *shape)) < likely)
        native.saw(bits, 0)
        numpy.saw(bits, 0)
        moved += same_moves(native, numpy)
    assert moved > 100
    assert native.counts == numpy.counts
    assert native.counts.moves == moved


def test_moves_are_due_a_fixed_number_of_tokens_after_their_decision() -> None:
    frequency = np.array([[1.0, 0.0]])
    native, _ = both(Slow(0.5, 0.0, every=4, delay=3), frequency, 1, np.array([[0, 1]]))
    due = []
    for token in range(12):
        native.saw(packed(np.array([[[0, 1]]])), 0)
        if (moves := native.moves()) is not None:
            due.append((token, moves.coming.tolist(), moves.going.tolist()))
    assert due == [(6, [1], [0])]


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("delay", [1, 3])
def test_what_moves_after_a_token_is_known_before_it_and_told_ahead(delay: int, most: int | None) -> None:
    generator, shape = np.random.default_rng(5), (3, 100)
    native, numpy = both(Slow(0.5, 0.0, 4, delay, most), generator.random(shape), 90, orders(shape, generator))
    assert native.foresees
    told, moved = None, 0
    for token in range(60):
        assert native.counts.tokens == token  # when all is counted, decisions are there
        told = native.ahead() or told
        found = native.moves(unseen=1)
        bits = packed(generator.random((1, *shape)) < generator.random(shape) ** 3)
        native.saw(bits, 0)
        numpy.saw(bits, 0)
        expected = numpy.moves()
        assert (found is None) == (expected is None)
        if found is not None:
            assert expected is not None
            assert np.array_equal(found.coming, expected.coming)
            assert np.array_equal(found.going, expected.going)
            assert told is not None
            assert told.coming is found.coming
            assert told.going is found.going
            moved += 1
    assert native.counts == numpy.counts
    assert moved > 10


def test_more_unseen_tokens_than_the_delay_are_refused() -> None:
    native, _ = both(Slow(every=4, delay=0), np.ones((2, 20)), 5, orders((2, 20), np.random.default_rng(1)))
    assert not native.foresees
    with pytest.raises(ValueError, match="unseen: expected at most the delay"):
        native.moves(unseen=1)


def test_bits_of_another_shape_are_refused() -> None:
    native, _ = both(Slow(), np.ones((2, 20)), 5, orders((2, 20), np.random.default_rng(1)))
    for shape in [(1, 2, 2), (1, 3, 3)]:
        with pytest.raises(ValueError, match="bits: expected"):
            native.saw(np.zeros(shape, np.uint8), 0)


@forks
@pytest.mark.filterwarnings("ignore:This process")
def test_in_a_forked_process_it_is_an_error_and_no_wait() -> None:
    native, _ = both(Slow(), np.ones((2, 20)), 5, orders((2, 20), np.random.default_rng(1)))
    child = os.fork()
    if not child:
        try:
            native.saw(np.zeros((1, 2, 3), np.uint8), 0)
        except RuntimeError:
            del native
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

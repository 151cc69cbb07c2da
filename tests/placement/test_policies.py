"""Policies on small traces: invariants of all, hand-made cases with known answers, brute force, what none exceeds."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.errors import PlacementError
from sparsepack.placement import policies
from sparsepack.placement.policies import POLICIES, Slow, Start, bound, momentum, play, slow
from sparsepack.placement.traffic import HitCounts

ON_DEMAND = ("static", "lru", "lfu", "momentum", "momentum-threshold", "momentum-letter", "belady-within-blocks")
"""Those that load a neuron only when it is needed."""


@st.composite
def starts(draw, most_tokens=24, most_units=6):
    """A session of up to three blocks."""
    tokens, blocks = draw(st.integers(1, most_tokens)), draw(st.integers(1, 3))
    units = draw(st.integers(1, most_units))
    seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.1, 0.3, 0.7]))
    random = np.random.default_rng(seed)
    # Some are needed far more often than others, and that changes in the middle.
    likely = random.random((2, blocks, units)) ** 3
    likely *= density / likely.mean()
    rows = [random.random((blocks, units)) < likely[token * 2 // tokens] for token in range(tokens)]
    frequency = random.random((blocks, units)).round(1)
    slots = draw(st.integers(0, blocks * units))
    return Start(frequency, slots, np.array(rows, np.uint8), draw(st.integers(0, tokens - 1)))


def watched(policy, start):
    """The outcome, and who had slots while each token was computed."""
    seen = []

    def begin(begun):
        placement, move = policy(begun)
        seen.append(placement.resident)

        def keep(token, needed, resident):
            after = resident if move is None else move(token, needed, resident)
            seen.append(after)
            return after

        return placement, keep

    return play(begin, start), seen[:-1]


@pytest.mark.parametrize("name", POLICIES)
@given(start=starts())
def test_what_is_counted_is_what_happened(name, start):
    outcome, seen = watched(POLICIES[name].begin, start)
    begun, ended = POLICIES[name].begin(start)[0].resident.sum(), {int(resident.sum()) for resident in seen}
    assert outcome.tokens == len(start.needed) - start.prompt
    decoded = range(start.prompt, len(start.needed))
    assert outcome.needed == sum(int(start.needed[token].sum()) for token in decoded)
    assert outcome.hits == sum(int((start.needed[token] * seen[token]).sum()) for token in decoded) <= outcome.needed
    came = [int((seen[token + 1] & ~seen[token]).sum()) for token in decoded if token + 1 < len(seen)]
    assert outcome.moves >= sum(came), "and those after the last token"
    assert 0 <= outcome.unused <= outcome.moves
    assert begun <= start.slots
    if name != "momentum-letter":
        assert ended == {int(begun)}, "as many come as go"
    assert play(POLICIES[name].begin, start) == outcome


@pytest.mark.parametrize("name", POLICIES)
@given(start=starts())
def test_groups_whose_neurons_are_all_active_together_are_as_one_neuron(name, start):
    grouped = Start(start.frequency, start.slots, 4 * start.needed, start.prompt, size=4)
    policy = slow(Slow(0.9, 0.05, every=2, delay=1)) if name == "slow" else POLICIES[name].begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "PRIOR", 4)  # else a prompt this short changes nothing
        alone, together = (play(policy, each) for each in (start, grouped))
    assert together == HitCounts(alone.tokens, 4 * alone.needed, 4 * alone.hits, alone.moves, alone.unused)


@pytest.mark.parametrize("name", [name for name, row in POLICIES.items() if not row.clairvoyant])
@given(start=starts(), seed=st.integers(0, 1000))
def test_causal_policies_do_not_look_ahead(name, start, seed):
    """Who has slots while a token is computed does not depend on that token or later ones."""
    cut = seed % len(start.needed)
    changed = start.needed.copy()
    changed[cut:] ^= 1
    other = Start(start.frequency, start.slots, changed, start.prompt)
    one, two = (watched(POLICIES[name].begin, each)[1][: cut + 1] for each in (start, other))
    if start.prompt <= cut or name != "static-after-prompt":
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ON_DEMAND)
@given(start=starts())
def test_those_that_load_on_demand_do_not_exceed_belady(name, start):
    assert play(POLICIES["belady"].begin, start).hits >= play(POLICIES[name].begin, start).hits


@given(start=starts(), decay=st.sampled_from([0.5, 0.9, 0.99]), margin=st.sampled_from([0.0, 0.1]))
def test_neither_does_the_slow_one_where_it_decides_every_token(start, decay, margin):
    policy = slow(Slow(decay, margin, every=1, delay=0))
    outcome, seen = watched(policy, start)
    came = [seen[token + 1] & ~seen[token] & (start.needed[token] == 0) for token in range(len(seen) - 1)]
    if not any(each.any() for each in came):  # float32 may tell apart in another order what decays
        assert play(POLICIES["belady"].begin, start).hits >= outcome.hits


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(start=starts(), price=st.sampled_from([0.0, 0.25, 1.0, 3.0]))
def test_nobody_exceeds_the_bound(name, start, price):
    outcome = play(POLICIES[name].begin, start)
    decoded = start.needed[start.prompt :].reshape(outcome.tokens, -1)
    # What moves after the last token is paid for, and what the prompt moved is not.
    assert outcome.hits - price * outcome.moves <= bound(decoded, start.slots, price) + 1e-9


def sets(units, slots):
    return [frozenset(each) for each in combinations(range(units), slots)]


@settings(max_examples=60)
@given(start=starts(most_tokens=5, most_units=4))
def test_belady_is_the_best_of_all_ways_to_load_on_demand(start):
    needed = start.needed.reshape(len(start.needed), -1) > 0
    units, slots = needed.shape[1], start.slots
    if slots > 4 or units > 8:
        return
    first = frozenset(np.flatnonzero(start.placement.resident.ravel()).tolist())
    reached = {first: 0}
    for token, row in enumerate(needed):
        here = set(np.flatnonzero(row).tolist())
        following: dict[frozenset[int], int] = {}
        for resident, hits in reached.items():
            gained = hits + (len(resident & here) if token >= start.prompt else 0)
            for after in sets(units, slots):
                if after <= resident | here:
                    following[after] = max(following.get(after, 0), gained)
        reached = following
    assert play(POLICIES["belady"].begin, start).hits == max(reached.values())


@settings(max_examples=60)
@given(start=starts(most_tokens=5, most_units=4), price=st.sampled_from([0.0, 0.25, 1.0]))
def test_the_bound_is_not_below_the_best_of_all_ways(start, price):
    needed = start.needed.reshape(len(start.needed), -1)
    units, slots = needed.shape[1], start.slots
    if slots > 4 or units > 8:
        return
    every = sets(units, slots)
    reached = dict.fromkeys(every, 0.0)
    for token, row in enumerate(needed):
        best_before = {
            after: max(value - price * len(after - before) for before, value in reached.items()) if token else 0.0
            for after in every
        }
        reached = {after: value + sum(int(row[unit]) for unit in after) for after, value in best_before.items()}
    assert bound(needed, slots, price) >= max(reached.values()) - 1e-9


def session(*tokens, units=3, frequency=(0.3, 0.2, 0.1), slots=1, prompt=0):
    """One block; each token is a string of the units that it needs."""
    rows = [[[chr(97 + unit) in token for unit in range(units)]] for token in tokens]
    return Start(np.array([frequency]), slots, np.array(rows, np.uint8), prompt)


def test_the_least_recently_used_goes():
    start = session("a", "b", "c", "b", "a", "b", slots=2)
    # ab | a | ab | bc (a is the oldest) | bc | ba | ba
    assert play(POLICIES["lru"].begin, start) == HitCounts(6, 6, 4, 2, 1)


def test_the_least_often_used_goes_and_who_is_as_often_used_stays():
    start = session("a", "a", "b", "b", "b", "c", "b")
    assert play(POLICIES["lfu"].begin, start) == HitCounts(7, 7, 3, 1, 0)


def test_belady_keeps_what_comes_again_soonest():
    start = session("a", "b", "c", "a", "b", "a", slots=2)
    # ab at first; c is not taken in, since both come again
    assert play(POLICIES["belady"].begin, start) == HitCounts(6, 6, 5, 0, 0)


def test_the_slow_one_decides_every_sixteenth_token_and_moves_four_later():
    start = session(*(["c"] * 60))
    outcome, seen = watched(POLICIES["slow"].begin, start)
    assert [bool(resident[0, 2]) for resident in seen] == [False] * 52 + [True] * 8
    assert outcome == HitCounts(60, 60, 8, 1, 0)


def test_what_is_decided_beyond_the_most_moves_after_the_next_tokens_and_the_best_first():
    start = session(*["de", "def", "f", "f"] * 2, units=6, frequency=(0.3, 0.2, 0.1, 0, 0, 0), slots=3)
    _, seen = watched(slow(Slow(0.1, 0.0, every=4, delay=1, most=1)), start)
    assert [np.flatnonzero(resident[0]).tolist() for resident in seen] == [
        *[[0, 1, 2]] * 5,  # decided after four tokens: f for c, d for b, e for a
        [0, 1, 5],
        [0, 3, 5],
        [3, 4, 5],
    ]


def test_what_no_token_is_left_for_does_not_move():
    start = session(*["def"] * 10, units=6, frequency=(0.3, 0.2, 0.1, 0, 0, 0), slots=3)
    _, seen = watched(slow(Slow(0.1, 0.0, every=4, delay=2, most=1)), start)
    assert [len(set(np.flatnonzero(resident[0])) & {3, 4, 5}) for resident in seen] == [0] * 6 + [1, 2, 2, 2]


def test_as_many_move_after_a_token_as_there_are_spare_slots():
    assert Slow().most_of(100) == 64
    assert Slow().most_of(640_000) == 10_000
    assert Slow(most=5).most_of(640_000) == 5
    with pytest.raises(PlacementError, match="most 0: expected at least 1"):
        Slow(most=0)


def test_moves_that_the_next_decision_would_come_before_are_refused():
    with pytest.raises(PlacementError, match="delay 4: expected at least 0, and less than every, 4"):
        Slow(every=4)


def test_a_bound_for_one_unit_is_what_it_gains():
    needed = np.array([[1], [0], [0], [1]], np.uint8)
    assert bound(needed, 1, 1.0) == pytest.approx(2)
    assert bound(needed, 0, 1.0) == pytest.approx(0)


def test_the_prompt_is_learned_from_and_not_counted():
    start = session(*(["c"] * 10), prompt=8)
    assert play(POLICIES["momentum"].begin, start) == HitCounts(2, 2, 2, 0, 0)
    assert play(POLICIES["lru"].begin, start) == HitCounts(2, 2, 2, 0, 0)


def test_a_threshold_keeps_one_hit_wonders_out():
    start = session("a", "b", "c", "b", "c", frequency=(0.0, 0.0, 0.0))
    with_it, without = (play(momentum(0.5, threshold), start) for threshold in (True, False))
    assert with_it.moves < without.moves


def test_where_nothing_changes_static_slots_are_as_good_as_any():
    random = np.random.default_rng(0)
    frequency = random.random((2, 40)) ** 2
    needed = (random.random((1500, 2, 40)) < frequency).astype(np.uint8)
    start = Start(frequency, 24, needed, 100)
    rates = {name: play(row.begin, start).hit_rate for name, row in POLICIES.items()}
    assert rates["static"] > rates["momentum"] > rates["static-same-share"] - 0.05
    assert rates["static"] > rates["lru"]
    assert rates["slow"] == pytest.approx(rates["static"], abs=0.01)
    assert rates["oracle-static"] == pytest.approx(rates["static"], abs=0.01)

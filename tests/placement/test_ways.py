"""What a decoded token took: of neurons that are active, and of those that copies of gates list."""

from dataclasses import replace

import pytest

from sparsepack.placement.budget import Parts, Plan, work_of
from sparsepack.placement.machine import BandwidthProfile, Listed, measured_rates, seconds_per_token
from sparsepack.placement.traffic import HitCounts, Traffic, TrafficStats, describe_per_token, per_token

WORK = work_of(hidden=256, intermediate=300, blocks=4, vocabulary=99, sequences=1, record=288, model=0)
PARTS = Parts(1000, 1000, (10,) * 4, (43_200,) * 4, record=288, neurons=300, cache=1000, work=WORK)
COPIED = replace(PARTS, copies=(21_000,) * 4, gate=144)
LINKS = BandwidthProfile(resident=1e7, bus=1e6, worker=2e6, handover=1e-5)
HITS = HitCounts(needed=4000, hits=1000, moves=30, tokens=10)
TRAFFIC = Traffic(resident=1000, bus=900, worker=2100, handed=40, waited=1e-3, managed=5e-4)


def test_bytes_of_active_neurons_are_those_of_their_records() -> None:
    plan = Plan(PARTS, 100, 4, 4)
    found = per_token(TrafficStats(TRAFFIC, HITS, plan, None), 1e-3)
    card, bus = plan.always_read()
    assert found["bytes"] == {
        "card": card + 100 * 288,
        "bus": bus + 90 * 288,
        "worker": 210 * 288,
        "moved": 3 * 288,
    }
    assert "100.0 of 400.0 active neurons had slots" in describe_per_token(found)
    assert "4.0 blocks handed over, 50 us between tokens for slots, 100 us waited" in describe_per_token(found)


def test_of_listed_neurons_the_gates_are_read_and_the_records_of_active_ones() -> None:
    plan = Plan(COPIED, 100, 4, 0, copied=4)
    found = per_token(TrafficStats(TRAFFIC, HITS, plan, LINKS, times=2.0), 1e-3)
    assert found["bytes"]["bus"] == pytest.approx(plan.always_read()[1] + 90 * (144 + 144))
    assert found["bytes"]["worker"] == pytest.approx(210 * (144 + 144))
    assert found["bytes"]["moved"] == 3 * (288 + 144)
    listed = Listed(400 / 1200, 0.25)
    expected = seconds_per_token(measured_rates(LINKS, 288), plan, 200 / 1200, 0.25, 3 / 1200, True, listed)
    assert found["model"]["together"] == pytest.approx(expected.together)
    assert len(set(expected.parts.values())) > 1
    assert found["model"][found["model"]["slowest"]] == max(expected.parts.values())
    assert "100.0 of 400.0 listed neurons had slots" in describe_per_token(found)


def test_where_some_blocks_have_copies_the_others_list_nobody() -> None:
    ways = TrafficStats(TRAFFIC, HITS, Plan(COPIED, 0, 4, 0, copied=1), None, times=3.0)
    assert ways.listed_share == pytest.approx(3 / 6)
    assert ways.neuron == pytest.approx((144 + 96) / 2 + 288 / 2)

"""The model of a machine's time: the sizes of models, limits, what more slots and a faster bus are worth."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.errors import PlacementError
from sparsepack.placement.budget import plan_of_share, plan_within
from sparsepack.placement.machine import (
    MACHINES,
    SHAPES,
    Listed,
    Machine,
    Shape,
    dense_split,
    machine_of,
    measured_rates,
    seconds_per_token,
)

PCIE5, LLAMA_70B = MACHINES["pcie5"], SHAPES["70b"]
NEAR = plan_of_share(LLAMA_70B.parts, 1)
"""A plan in which all but the embedding is read from the card."""


def tokens_per_second(machine: Machine, shape: Shape, *about: Any) -> float:
    """With slots for half of the neurons; about -- what `seconds_per_token` takes after the plan."""
    return seconds_per_token(machine.rates(shape.record_bytes), plan_of_share(shape.parts, 0.5), *about).rate


def test_sizes_are_those_of_the_models():
    assert LLAMA_70B.record_bytes == 2 * 8192 * 4.5 / 8
    large, small = (SHAPES[name].parts for name in ("70b", "13b"))
    assert sum(large.gates) == pytest.approx(10.6e9, rel=0.01)
    assert large.weights - large.embedding == pytest.approx(38.7e9, rel=0.01)
    assert small.weights - small.embedding == pytest.approx(7.3e9, rel=0.02)
    assert SHAPES["13b"].cache == pytest.approx(1.7e9, rel=0.02)


@pytest.mark.parametrize(
    ("machine", "hit_rate", "over_the_bus", "expected"),
    [
        ("pcie5", 0.497, False, 34.9),
        ("pcie5", 0.53, True, 40.4),
        ("pcie4", 0.53, True, 18.6),
        ("server", 1, True, 154.8),
    ],
)
def test_speeds_are_those_that_are_computed_by_hand(machine, hit_rate, over_the_bus, expected):
    # 309.7 thousand neurons of 9,216 bytes; 18.85 GB besides at 70 % of the GPU's bandwidth; 20 us for 80 blocks.
    found = tokens_per_second(MACHINES[machine], LLAMA_70B, 0.135, hit_rate, 0.0, over_the_bus)
    assert found == pytest.approx(expected, rel=0.01)


def test_everything_in_the_gpus_memory_needs_no_handing_over():
    assert tokens_per_second(PCIE5, LLAMA_70B, 0.0, 1.0, 0.0, False) == pytest.approx(
        0.7 * 3350e9 / NEAR.always_read()[0]
    )


@given(hit=st.floats(0, 1), moved=st.floats(0, 0.01), density=st.floats(0.01, 1))
def test_fewer_moves_and_the_bus_never_make_it_slower(hit, moved, density):
    slow = tokens_per_second(PCIE5, LLAMA_70B, density, hit, moved, False)
    assert tokens_per_second(PCIE5, LLAMA_70B, density, hit, moved, True) >= slow
    assert tokens_per_second(PCIE5, LLAMA_70B, density, hit, 0.0, False) >= slow


def test_moves_that_the_bus_cannot_carry_slow_it_down():
    fast, slow = (tokens_per_second(PCIE5, LLAMA_70B, 0.135, 0.6, moved, True) for moved in (0.0002, 0.1))
    assert slow < 0.6 * fast


def test_the_bus_helps_most_where_the_processor_is_slow():
    found = []
    for machine in (PCIE5, replace(PCIE5, cpu=48)):
        alone, helped = (tokens_per_second(machine, LLAMA_70B, 0.135, 0.53, 0.0, over) for over in (False, True))
        found.append(helped / alone)
    assert found == pytest.approx([1.10, 1.53], abs=0.02)


def test_memory_gives_slots_and_with_little_of_it_gates_are_read_from_host_memory():
    assert plan_within(LLAMA_70B.parts, int(24e9)).share == pytest.approx(0.21, abs=0.02)
    assert plan_within(LLAMA_70B.parts, int(100e9)).whole
    little = plan_within(LLAMA_70B.parts, int(12e9))
    assert (little.slots, little.attention) == (0, 80)
    assert 0 < little.gates < 80
    rates = PCIE5.rates(LLAMA_70B.record_bytes)
    # Over the bus alone, or by both sides: then memory bounds them, and each gate is handed over.
    for both, speed, handovers in ((False, 55e9, 0), (True, 0.9 * 100e9, 80 - little.gates)):
        speeds = [
            seconds_per_token(rates, plan, 0.135, 0, 0, both).rate
            for plan in (little, plan_of_share(LLAMA_70B.parts, 0))
        ]
        longer = little.host["gates"] / speed - little.host["gates"] / (0.7 * 3350e9) + handovers * 20e-6
        assert 1 / speeds[0] - 1 / speeds[1] == pytest.approx(longer)


def test_measured_links_give_the_speed_of_a_machine_that_has_them():
    rates = replace(PCIE5, dram=1e9, cpu=50).rates(LLAMA_70B.record_bytes)
    measured = measured_rates(rates.bandwidth, LLAMA_70B.record_bytes)
    assert measured.card == pytest.approx(rates.card)
    for over in (True, False):
        found = [seconds_per_token(each, NEAR, 0.135, 0.6, 0.0, over).rate for each in (rates, measured)]
        assert found[0] == pytest.approx(found[1])


def test_matrices_are_read_as_fast_as_records_where_nobody_measured_them():
    rates = PCIE5.rates(LLAMA_70B.record_bytes)
    slow = replace(rates.bandwidth, resident=rates.bandwidth.resident / 4)
    assert measured_rates(slow, LLAMA_70B.record_bytes).card == rates.card
    assert measured_rates(replace(slow, near=0.0), LLAMA_70B.record_bytes).card == pytest.approx(rates.card / 4)


def test_the_dense_split_reads_what_does_not_fit_from_host_memory():
    rates, parts = PCIE5.rates(LLAMA_70B.record_bytes), LLAMA_70B.parts
    assert dense_split(rates, parts, 24e9) == pytest.approx(5.0, abs=0.15)
    assert dense_split(rates, parts, 48e9) == pytest.approx(58.5, rel=0.01)
    assert dense_split(rates, parts, 1e9) > 0


def test_a_machine_is_read_from_a_file(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"hbm": 900, "dram": 40, "pcie": 12.5, "cpu": 20}))
    found = machine_of(str(path))
    assert (found.hbm, found.cpu, found.handover_us) == (900, 20, 20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no machine; expected a JSON object with numbers for hbm, dram"),
        ("[1]", "no machine"),
        ('{"hbm": 1, "dram": 1}', "no machine"),
        ('{"hbm": 1, "dram": 1, "pcie": 1, "speed": 1}', "no machine"),
        ('{"hbm": 0, "dram": 1, "pcie": 1}', "expected numbers above 0"),
        ('{"hbm": "1", "dram": 1, "pcie": 1}', "expected numbers above 0"),
        ('{"hbm": Infinity, "dram": 1, "pcie": 1}', "expected numbers above 0"),
        (f'{{"hbm": 1{400 * "0"}, "dram": 1, "pcie": 1}}', "expected numbers above 0 .* up to 1e.09"),
        ('{"hbm": NaN, "dram": 1, "pcie": 1}', "expected numbers above 0"),
    ],
)
def test_what_is_no_machine_is_refused(tmp_path, content, message):
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(PlacementError, match=message) as caught:
        machine_of(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_machine_is_refused(tmp_path):
    with pytest.raises(PlacementError, match="expected one of pcie3, pcie4, pcie5, server, or a "):
        machine_of("pcie6")
    with pytest.raises(PlacementError, match="cannot be read"):
        machine_of(str(tmp_path / "missing.json"))


def test_mixtures_have_as_many_weights_as_their_names_say() -> None:
    for name, billions in (("30b-a3b", 30.5), ("8x7b", 46.7)):
        parts = SHAPES[name].parts
        assert SHAPES[name].unit == "experts"
        assert parts.weights / 4.5 * 8 == pytest.approx(billions * 1e9, rel=0.01)
        assert parts.neurons == SHAPES[name].experts
        assert parts.spare == SHAPES[name].used


def test_of_listed_neurons_the_gates_are_read_where_they_lie():
    parts = SHAPES["13b"].parts
    row = parts.gates[0] // parts.neurons
    copied = replace(parts, copies=tuple(size // 2 for size in parts.gates), gate=row)
    rates = PCIE5.rates(parts.record)
    plan = plan_within(copied, int(5.5e9))
    assert (plan.gates, plan.copied) == (0, 40)
    assert plan.slots
    listed = Listed(0.2, 0.4)
    found = seconds_per_token(rates, plan, 0.135, 0.5, 0.0, True, listed)
    none = seconds_per_token(rates, plan, 0.135, 0.5, 0.0, True, Listed(0.0, 1.0))
    bandwidth, of_all = rates.bandwidth, 0.2 * parts.all_neurons * row / parts.record
    assert found.slots - none.slots == pytest.approx(0.4 * of_all / bandwidth.resident)
    by_links, by_memory = 0.6 * of_all / (bandwidth.bus + bandwidth.worker), 0.6 * of_all * parts.record / rates.host
    assert found.host - none.host == pytest.approx(max(by_links, by_memory))
    assert (found.card, found.far) == (none.card, none.far)
    far = plan_within(parts, int(5.5e9))
    assert seconds_per_token(rates, far, 0.135, 0.0, 0.0, True).together > found.together

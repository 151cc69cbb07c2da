"""The model of time with copies of gates on the GPU, beside that of `simulate`."""

import ggml
import numpy as np
import pytest

if ggml.library() is None:
    pytest.skip("llama-cpp-python is absent: the script compares copies with ggml's", allow_module_level=True)

from gate_copy import hit_rates, speeds

from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.machine import MACHINES, SHAPES, Machine, seconds_per_token

TOKENS = 1000
FREQUENCY = np.linspace(0.9, 0.02, 400).reshape(4, 100)
COUNTS = np.round(TOKENS * np.stack([np.minimum(1, 1.5 * FREQUENCY), FREQUENCY]))
"""How often each neuron was listed, and active."""
every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


def test_slots_serve_the_most_frequent() -> None:
    listed, active = hit_rates(COUNTS, FREQUENCY, 0.25)
    assert active == pytest.approx(COUNTS[1, 0].sum() / COUNTS[1].sum())
    assert listed == pytest.approx(COUNTS[0, 0].sum() / COUNTS[0].sum())
    assert hit_rates(COUNTS, FREQUENCY, 1.0) == (1.0, 1.0)


@every_machine
@pytest.mark.parametrize("vram", [20e9, 24e9, 32e9])
def test_gates_near_are_the_model_of_simulate(machine: Machine, vram: float) -> None:
    shape = SHAPES["70b"]
    parts = shape.parts
    found = speeds(machine, shape, vram, 2, COUNTS, FREQUENCY, TOKENS)
    beside = parts.cache + parts.output + sum(parts.attention) + sum(parts.gates)
    share = (vram - parts.work_within(int(vram)).bytes - beside) / parts.records
    hit = hit_rates(COUNTS, FREQUENCY, share)[1]
    density = float(COUNTS[1].sum()) / TOKENS / FREQUENCY.size
    plan, rates = plan_of_share(parts, share), machine.rates(parts.record)
    expected = seconds_per_token(rates, plan, density, hit, 0.0, over_the_bus=True).rate
    assert found["gates near"] == pytest.approx(expected, rel=1e-6)
    assert found["gates far, by both"] == found["gates near"]


@every_machine
def test_what_does_not_fit_has_no_speed_or_a_part_of_it_far(machine: Machine) -> None:
    of = [speeds(machine, SHAPES["70b"], 1e9 * budget, 2, COUNTS, FREQUENCY, TOKENS) for budget in (10, 14, 18)]
    assert [each["gates near"] for each in of] == [None] * 3
    for name in ("gates far, by the bus", "gates far, by both"):
        rates = [each[name] for each in of]
        assert rates == sorted(rates), "more room is never slower"
    parts = SHAPES["70b"].parts
    # Where no copies fit, all gates are far and are read by both sides.
    beside = parts.cache + parts.output + sum(parts.attention)
    budget = beside
    for _ in range(20):  # buffers grow with the budget, by little of what it grows
        budget = beside + parts.work_within(budget).bytes
    none = speeds(machine, SHAPES["70b"], budget, 1, COUNTS, FREQUENCY, TOKENS)
    for name in ("copy, bus", "copy, Q4_K", "copy, Q6_K"):
        assert none[name] == pytest.approx(none["gates far, by both"])


@every_machine
def test_gates_by_rows_are_never_slower_than_numbers_and_tables(machine: Machine) -> None:
    for budget in (12, 16, 24):
        found = speeds(machine, SHAPES["70b"], 1e9 * budget, 2, COUNTS / 4, FREQUENCY / 4, TOKENS)
        assert found["copy, Q4_K"] >= found["copy, Q6_K"]
        if machine.pcie * 1.2 < 0.9 * machine.dram:  # host memory has more to give than the bus
            assert found["copy, Q4_K"] > found["copy, bus"]

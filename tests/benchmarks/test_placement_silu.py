"""The study of placement in models with SiLU: its shapes and its ways to divide a model, beside those of `simulate`."""

import pytest
from placement_silu import smallest
from silu_speeds import BOTH, GATE, far_last, parts_of, split_by_layers

from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.machine import MACHINES, SHAPES, Machine, dense_split, seconds_per_token

every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


@pytest.mark.parametrize("name", ["7b", "13b", "70b"])
def test_a_shape_by_the_gate_is_that_of_simulate(name: str) -> None:
    assert parts_of(name, GATE) == SHAPES[name].parts


def test_gate_and_up_leave_a_column_of_down_to_the_slots() -> None:
    known, found = SHAPES["70b"].parts, parts_of("70b", BOTH)
    assert found.record == known.record // 2
    assert sum(found.gates) == 2 * sum(known.gates)
    assert found.weights == known.weights


@every_machine
def test_where_everything_fits_and_is_read_all_divisions_are_the_dense_one(machine: Machine) -> None:
    parts, room = parts_of("13b", BOTH), 100e9
    rates = machine.rates(parts.record)
    dense = dense_split(rates, SHAPES["13b"].parts, room)
    assert split_by_layers(rates, parts, room, 1.0, 1.0) == pytest.approx(dense)
    assert far_last(rates, parts, room, 1.0) == pytest.approx(dense)
    assert seconds_per_token(rates, plan_of_share(parts, 1), 1.0, 1.0, 0.0, False).rate == pytest.approx(dense)


@every_machine
@pytest.mark.parametrize("vram", [4e9, 12e9, 24e9, 36e9])
def test_no_division_is_faster_than_the_memories_that_it_reads(machine: Machine, vram: float) -> None:
    parts = parts_of("70b", BOTH)
    rates, read = machine.rates(parts.record), parts.weights - parts.embedding
    far = read - max(0.0, min(read, vram - parts.least))
    least = 0.5 * min(far, parts.records) / rates.host + parts.cache / rates.card
    assert far_last(rates, parts, vram, 0.5) < 1 / least
    assert far_last(rates, parts, vram, 0.5) > far_last(rates, parts, vram, 1.0)
    assert split_by_layers(rates, parts, vram, 0.5, 0.5) > split_by_layers(rates, parts, vram, 1.0, 0.5)


def test_the_smallest_share_that_loses_no_more() -> None:
    rows = [
        {"rule": GATE, "share": share, "perplexity_ratio": {"value": value}}
        for share, value in ((0.8, 1.001), (0.7, 1.004), (0.6, 1.02))
    ]
    assert smallest(rows, GATE, 1.005) == 0.7
    assert smallest(rows, GATE, 1.0005) == 1.0
    assert smallest(rows, BOTH, 1.1) == 1.0

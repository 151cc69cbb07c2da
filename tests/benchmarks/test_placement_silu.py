"""The study of placement in models with SiLU: its shapes and its ways to divide a model, beside those of `simulate`."""

import pytest
from placement_silu import BOTH, GATE, far_last, shape_of, smallest, split_by_layers

from sparsepack.placement.machine import BUFFERS, DRAM, HBM, MACHINES, SHAPES, Machine, dense_split, tokens_per_second

every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


@pytest.mark.parametrize("name", ["7b", "13b", "70b"])
def test_a_shape_by_the_gate_is_that_of_simulate(name: str) -> None:
    known, found = SHAPES[name], shape_of(name, GATE)
    assert (found.record_bytes, found.gates, found.least) == (known.record_bytes, known.gates, known.least)


def test_gate_and_up_leave_a_column_of_down_to_the_slots() -> None:
    known, found = SHAPES["70b"], shape_of("70b", BOTH)
    assert found.record_bytes == int(known.row_bytes)
    assert found.gates == 2 * known.gates


@every_machine
def test_where_everything_fits_and_is_read_all_divisions_are_the_dense_one(machine: Machine) -> None:
    shape, room = shape_of("13b", BOTH), 100e9
    dense = dense_split(machine, SHAPES["13b"], room)
    assert split_by_layers(machine, shape, room, 1.0, 1.0) == pytest.approx(dense)
    assert far_last(machine, shape, room, 1.0) == pytest.approx(dense)
    assert tokens_per_second(machine, shape, 1.0, 1.0, 0.0, False) == pytest.approx(dense)


@every_machine
@pytest.mark.parametrize("vram", [4e9, 12e9, 24e9, 36e9])
def test_no_division_is_faster_than_the_memories_that_it_reads(machine: Machine, vram: float) -> None:
    shape = shape_of("70b", BOTH)
    near = max(0.0, min(shape.attention + 3 * shape.neurons * shape.row_bytes, vram - shape.cache - BUFFERS))
    far = shape.attention + 3 * shape.neurons * shape.row_bytes - near
    least = 0.5 * min(far, shape.neurons * shape.row_bytes) / (DRAM * machine.dram * 1e9)
    least += shape.cache / (HBM * machine.hbm * 1e9)
    assert far_last(machine, shape, vram, 0.5) < 1 / least
    assert far_last(machine, shape, vram, 0.5) > far_last(machine, shape, vram, 1.0)
    assert split_by_layers(machine, shape, vram, 0.5, 0.5) > split_by_layers(machine, shape, vram, 1.0, 0.5)


def test_the_smallest_share_that_loses_no_more() -> None:
    rows = [
        {"rule": GATE, "share": share, "perplexity_ratio": {"value": value}}
        for share, value in ((0.8, 1.001), (0.7, 1.004), (0.6, 1.02))
    ]
    assert smallest(rows, GATE, 1.005) == 0.7
    assert smallest(rows, GATE, 1.0005) == 1.0
    assert smallest(rows, BOTH, 1.1) == 1.0

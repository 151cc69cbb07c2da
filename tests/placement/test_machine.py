"""The model of a machine's time: the sizes of models, limits, what more slots and a faster bus are worth."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.errors import PlacementError
from sparsepack.placement.machine import MACHINES, SHAPES, dense_split, machine_of, share_in, tokens_per_second

PCIE5, LLAMA_70B = MACHINES["pcie5"], SHAPES["70b"]


def test_sizes_are_those_of_the_models():
    assert LLAMA_70B.record_bytes == 2 * 8192 * 4.5 / 8
    assert LLAMA_70B.gates == pytest.approx(10.6e9, rel=0.01)
    assert 3 * LLAMA_70B.gates + LLAMA_70B.attention == pytest.approx(38.7e9, rel=0.01)
    assert 3 * SHAPES["13b"].gates + SHAPES["13b"].attention == pytest.approx(7.3e9, rel=0.02)
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
        0.7 * 3350e9 / (LLAMA_70B.attention + LLAMA_70B.cache + LLAMA_70B.gates)
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


def test_memory_gives_slots_and_too_little_is_refused():
    assert share_in(24e9, LLAMA_70B) == pytest.approx(0.206, abs=0.001)
    assert share_in(100e9, LLAMA_70B) == 1
    with pytest.raises(
        PlacementError, match=r"--vram 12GB: attention, gates, cache and buffers need 19\.7GB; expected"
    ):
        share_in(12e9, LLAMA_70B)


def test_the_dense_split_reads_what_does_not_fit_from_host_memory():
    assert dense_split(PCIE5, LLAMA_70B, 24e9) == pytest.approx(5.0, abs=0.15)
    assert dense_split(PCIE5, LLAMA_70B, 48e9) == pytest.approx(58.5, rel=0.01)
    assert dense_split(PCIE5, LLAMA_70B, 1e9) > 0


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

"""What is stated of the memory of Apple's chips, and what `bench` makes of it."""

import pytest
import torch

from sparsepack.bench import bandwidth


@pytest.mark.parametrize(
    ("chip", "cores", "gigabytes"),
    [
        ("Apple M2 Pro", 19, 200),
        ("Apple M2 Pro", None, 200),
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M3 Max", None, None),
        ("Apple M4 Max", 36, None),
        ("Apple M99", 10, None),
        ("arm", None, None),
    ],
)
def test_a_chip_has_what_apple_states_where_its_name_and_cores_say_which(
    chip: str, cores: int | None, gigabytes: int | None
) -> None:
    assert bandwidth.stated_bandwidth(chip, cores) == (None if gigabytes is None else gigabytes * 1e9)


def test_the_bound_of_a_mac_is_what_apple_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "cpu_info", lambda: "Apple M4 Max")
    monkeypatch.setattr(bandwidth, "gpu_cores", lambda: 40)
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: pytest.fail("measured"))
    found = bandwidth.bandwidth_of(torch.device("mps"))
    assert found == bandwidth.Bandwidth(546e9, "as Apple states for Apple M4 Max")


def test_of_a_chip_that_no_table_has_it_is_measured_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "cpu_info", lambda: "Apple M9 Max")
    monkeypatch.setattr(bandwidth, "gpu_cores", lambda: 50)
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: 1e9)
    found = bandwidth.bandwidth_of(torch.device("mps"))
    assert found.bytes_per_second == 1e9
    assert found.how.endswith("what Apple states for Apple M9 Max with 50 GPU cores is not known here")
    assert "not known" not in bandwidth.bandwidth_of(torch.device("cpu")).how

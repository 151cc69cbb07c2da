"""Energy as a fake machine counts it."""

from pathlib import Path

import pytest
import torch

from sparsepack.bench.energy import EnergyMeter, energy_meter

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two packages, the cores of the first, and the whole platform."""
    names = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core", "intel-rapl:2": "psys"}
    for zone, name in names.items():
        folder = tmp_path / "sys/class/powercap" / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("9999999\n")
        (folder / "energy_uj").write_text("1000000\n")
    return tmp_path


def count(root: Path, zone: str, microjoules: int) -> None:
    (root / "sys/class/powercap" / zone / "energy_uj").write_text(f"{microjoules}\n")


def meter_of(root: Path) -> EnergyMeter:
    meter = energy_meter(CPU, root)
    assert meter is not None
    return meter


def test_packages_are_added_and_nothing_counts_twice(root: Path) -> None:
    meter = meter_of(root)
    before = meter.read()
    for zone, microjoules in {"0": 4_000_000, "1": 1_500_000, "0:0": 3_000_000, "2": 9_000_000}.items():
        count(root, f"intel-rapl:{zone}", microjoules)
    assert meter.joules(before) == pytest.approx(3.5)
    assert meter.how == "RAPL, 2 packages"


def test_a_counter_may_begin_anew(root: Path) -> None:
    count(root, "intel-rapl:0", 9_500_000)
    meter = meter_of(root)
    before = meter.read()
    count(root, "intel-rapl:0", 500_000)
    assert meter.joules(before) == pytest.approx(1.0)


def test_what_cannot_be_read_is_no_meter(root: Path, tmp_path: Path) -> None:
    counter = root / "sys/class/powercap/intel-rapl:1/energy_uj"
    counter.unlink()
    counter.mkdir()  # reading fails for the superuser, too
    assert energy_meter(CPU, root) is None
    assert energy_meter(CPU, tmp_path / "nothing") is None
    assert energy_meter(torch.device("mps"), root) is None

"""How many cores a process may use, and their caches, as systems tell it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepack.runtime.cpu import machine
from sparsepack.runtime.cpu.machine import cpu_info, last_caches, processors, usable_cores


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors, two of a core; the process may run on six of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 4, 5, 6}, raising=False)
    for cpu in range(8):
        told = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        told.mkdir(parents=True)
        (told / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "sys/fs/cgroup/cpu").mkdir(parents=True)
    return tmp_path


def test_two_threads_of_a_core_count_once(system: Path) -> None:
    assert usable_cores(system) == 3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 3),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 3),
        ("", 3),
    ],
)
def test_a_container_has_no_more_than_its_share(system: Path, limit: str, expected: int) -> None:
    (system / "sys/fs/cgroup/cpu.max").write_text(limit)
    assert usable_cores(system) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 3), ("200000", 2)])
def test_so_has_one_of_an_old_system(system: Path, quota: str, expected: int) -> None:
    (system / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text(quota)
    (system / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000")
    assert usable_cores(system) == expected


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_a_group_is_limited_by_those_above_it(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/user.slice/app.scope")
    write(system / "sys/fs/cgroup/user.slice/app.scope/cpu.max", "max 100000")
    assert usable_cores(system) == 3
    write(system / "sys/fs/cgroup/user.slice/cpu.max", "200000 100000")
    assert usable_cores(system) == 2
    write(system / "proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n0::/")
    write(system / "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "100000")
    write(system / "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    assert usable_cores(system) == 1


def test_efficiency_cores_are_left_out(system: Path) -> None:
    write(system / "sys/devices/cpu_core/cpus", "0-1,4-5")  # cores 0 and 1; 2 and 6 are of core 2
    found = processors(system)
    assert (found.processors, found.cores, found.fast, found.usable) == (6, 3, 2, 2)
    assert str(found) == "6 processors of 3 cores (2 of them fast)"
    write(system / "sys/devices/cpu_core/cpus", "3,7")
    assert usable_cores(system) == 3, "the process may run on no other"


def test_small_cores_of_arm_are_left_out(system: Path) -> None:
    for cpu, capacity in enumerate((1024, 280, 870, 280, 1024, 280, 870)):
        write(system / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", capacity)
    assert usable_cores(system) == 2


def test_numa_nodes_of_the_processors_are_counted(system: Path) -> None:
    for node, cpus in enumerate(("0-3", "4-7", "8-11")):
        write(system / f"sys/devices/system/node/node{node}/cpulist", cpus)
    assert processors(system).nodes == 2
    assert str(processors(system)) == "6 processors of 3 cores, 2 NUMA nodes"


def test_a_system_that_does_not_tell_has_a_core_for_each_processor(system: Path, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "nothing") == 6


def test_here_there_is_one_at_least() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What macOS says of the machine, by name."""
    said: dict[str, str] = {}

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess:
        if command[2] not in said:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, said[command[2]] + "\n", "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    machine._sysctl.cache_clear()
    yield said
    machine._sysctl.cache_clear()


def test_a_mac_tells_its_chip_and_its_performance_cores(mac: dict[str, str]) -> None:
    mac |= {"machdep.cpu.brand_string": "Apple M2 Pro", "hw.perflevel0.physicalcpu": "8"}
    assert cpu_info() == "Apple M2 Pro"
    assert usable_cores() == 8


def test_a_mac_that_does_not_tell_has_a_name_and_all_of_its_cores(mac: dict[str, str]) -> None:
    assert cpu_info()
    assert usable_cores() == 12


def test_each_cache_of_the_last_level_counts_once(system: Path) -> None:
    assert last_caches(system) == 0
    for cpu in range(8):
        for level, size, shared in ((1, "48K", f"{cpu}"), (3, "32768K", "0-3" if cpu < 4 else "4-7")):
            index = system / f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}"
            index.mkdir(parents=True)
            for name, value in {"level": level, "size": size, "shared_cpu_list": shared}.items():
                (index / name).write_text(f"{value}\n")
    assert last_caches(system) == 64 << 20
    (system / "sys/devices/system/cpu/cpu5/cache/index3/size").write_text("many\n")
    assert last_caches(system) == 64 << 20, "another processor tells"

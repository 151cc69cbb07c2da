"""The processor that this is: its name, and the cores of it that this process may use."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files of a control group, new and old: microseconds of processors that it may use in a period, and the period."""


def cpu_info() -> str:
    """The processor's name; on a Mac that of the chip: "Apple M2 Pro"."""
    if name := _sysctl("machdep.cpu.brand_string"):
        return name
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores(system: Path = Path("/sys")) -> int:
    """How many cores this process may use at once: those that it may run on, two threads of a core counted once, and
    within a container no more than its share of time allows.

    system -- where the system tells what it has
    """
    if not hasattr(os, "sched_getaffinity"):
        # On Apple silicon without the efficiency cores, for which the others would wait; torch counts alike.
        return int(_sysctl("hw.perflevel0.physicalcpu") or os.cpu_count() or 1)
    cores = {_siblings(system, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), *(_quota(system / "fs/cgroup", names) for names in _QUOTAS)))


def last_caches(system: Path = Path("/sys")) -> int:
    """The bytes of all caches of the last level that this process's processors have, each counted once; 0 where the
    system does not tell.

    system -- where the system tells what it has
    """
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        with suppress(OSError, ValueError):
            levels = (system / f"devices/system/cpu/cpu{cpu}/cache").glob("index*")
            last = max(levels, key=lambda index: int((index / "level").read_text()))
            kibibytes = int((last / "size").read_text().strip().removesuffix("K"))
            found[(last / "shared_cpu_list").read_text()] = kibibytes << 10
    return sum(found.values())


@cache
def _sysctl(name: str) -> str:
    """What macOS says of the machine; empty elsewhere, and where it does not say."""
    if sys.platform != "darwin":
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True)
        return asked.stdout.strip()
    return ""


def _siblings(system: Path, cpu: int) -> str:
    """The threads of the core that a processor is of; its number where the system does not tell."""
    with suppress(OSError):
        return (system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def _quota(group: Path, names: tuple[str, ...]) -> int:
    """The whole processors that a control group may use at once; very many where nothing limits it."""
    with suppress(OSError, ValueError):
        quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
        if quota > 0 and period > 0:
            return max(1, quota // period)
    return 1 << 20

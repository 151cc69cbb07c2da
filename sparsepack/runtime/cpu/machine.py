"""The processor that this is: its name, and the cores of it that this process may use."""

import os
import platform
from contextlib import suppress
from pathlib import Path

_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files of a control group, new and old: microseconds of processors that it may use in a period, and the period."""


def cpu_info() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores(system: Path = Path("/sys")) -> int:
    """How many cores this process may use at once: those that it may run on, two threads of a core counted once, and
    within a container no more than its share of time allows.

    system -- where the system tells what it has
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_siblings(system, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), *(_quota(system / "fs/cgroup", names) for names in _QUOTAS)))


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

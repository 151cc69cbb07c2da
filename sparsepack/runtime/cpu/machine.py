"""The processor, its caches and cores; the compiled module, and which of its instruction sets runs."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsepack.errors import UserError

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
        output = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True
        )
        return output.stdout.strip()
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


FORCED = "SPARSEPACK_ISA"
"""This environment variable names the instruction set to run, for tests and comparisons."""

_REMEDY = (
    "run `pip install --force-reinstall --no-deps --no-cache-dir sparsepack`, in its source folder with `.` in place "
    "of `sparsepack`, or use the reference backend"
)
"""Without --no-cache-dir pip installs again what it built without a compiler."""


def native() -> Any:
    """The compiled module `sparsepack.runtime.cpu._native`. Raises `UserError` where it is missing or does not load."""
    try:
        return import_module("sparsepack.runtime.cpu._native")
    except ModuleNotFoundError as error:
        raise UserError(
            "the CPU kernels were not built: no working C++17 compiler when sparsepack was installed; install g++ or "
            f"clang++ and {_REMEDY}"
        ) from error
    except ImportError as error:
        raise UserError(f"the CPU kernels cannot be loaded ({error}); {_REMEDY}") from error


def instruction_sets() -> list[str]:
    """The instruction sets in the build that this machine runs, best first. Raises `UserError` as `native` does."""
    return list(native().instruction_sets())


def instruction_set() -> str:
    """The best one, or the one that SPARSEPACK_ISA forces. Raises `UserError` where that cannot run here."""
    known = instruction_sets()
    forced = os.environ.get(FORCED)
    if not forced:
        return known[0]
    if forced not in known:
        raise UserError(f"{FORCED}={forced}: not available on this machine; expected one of {', '.join(known)}")
    return forced


def operations() -> Any:
    """The native operations of that instruction set, on as many threads as torch has now."""
    import torch  # here, so that `sparsepack --version` takes no seconds

    return _operations(instruction_set(), torch.get_num_threads())


@lru_cache(maxsize=4)
def _operations(instruction_set: str, threads: int) -> Any:
    return native().Operations(instruction_set, threads)

"""The processor, its caches and cores; the compiled module, and which of its instruction sets runs."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsepack.errors import UserError
from sparsepack.progress import format_count


def cpu_info() -> str:
    """The processor's name; on a Mac that of the chip: "Apple M2 Pro"."""
    if name := _sysctl("machdep.cpu.brand_string"):
        return name
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Processors:
    """What this process may run on, and what its container lets it use of that.

    processors -- threads of cores: hyper-threads count
    cores      -- physical cores
    fast       -- of these the performance cores, all where they are alike
    quota      -- processors whose time it may use at once; None: no limit
    nodes      -- NUMA nodes of these processors; 0 where the system does not say
    """

    processors: int
    cores: int
    fast: int
    quota: int | None = None
    nodes: int = 0

    @property
    def usable(self) -> int:
        """How many threads of an engine are fastest: one for each fast core, within the quota. Others share a core with
        one of these, or are waited for."""
        return self.fast if self.quota is None else min(self.fast, self.quota)

    def __str__(self) -> str:
        kinds = f" ({self.fast} of them fast)" if self.fast < self.cores else ""
        quota = "" if self.quota is None else f", a quota of {self.quota}"
        nodes = f", {self.nodes} NUMA nodes" if self.nodes > 1 else ""
        return (
            f"{format_count(self.processors, 'processor')} of {format_count(self.cores, 'core')}{kinds}{quota}{nodes}"
        )


def processors(root: Path = Path("/")) -> Processors:
    """What this process may run on.

    root -- of the files /sys and /proc, in which Linux says it
    """
    if not hasattr(os, "sched_getaffinity"):
        count = os.cpu_count() or 1
        cores = int(_sysctl("hw.physicalcpu") or count)
        return Processors(count, cores, int(_sysctl("hw.perflevel0.physicalcpu") or cores))
    allowed, system = os.sched_getaffinity(0), root / "sys/devices/system"
    fast = _fast(root, allowed)
    nodes = [_numbers(node / "cpulist") & allowed for node in (system / "node").glob("node[0-9]*")]
    return Processors(
        len(allowed),
        len({_siblings(system, cpu) for cpu in allowed}),
        len({_siblings(system, cpu) for cpu in fast}),
        _quota(root),
        len([node for node in nodes if node]),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """How many threads are fastest; see `Processors.usable`."""
    return processors(root).usable


def default_threads() -> int:
    """The threads of an engine unless told otherwise: torch's, and no more than are fast."""
    import torch  # here, so that `sparsepack --version` takes no seconds

    return min(torch.get_num_threads(), usable_cores())


def last_caches(root: Path = Path("/")) -> int:
    """The bytes of all caches of the last level that this process's processors have, each counted once; 0 where the
    system does not tell.

    root -- as `processors` has it
    """
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        with suppress(OSError, ValueError):
            levels = (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")
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
        return (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def _numbers(path: Path) -> set[int]:
    """The numbers in a list of the kernel's, such as "0-3,8"; none where it is not there."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found |= {*range(int(first), int(last or first) + 1)}
    return found


_SLOW = 0.5
"""A core of ARM with less than this share of the capacity of the largest is an efficiency core."""


def _fast(root: Path, allowed: set[int]) -> set[int]:
    """The processors of performance cores: those that Intel's hybrid processors name, or ARM's of large capacity; all
    where they are alike, or no other may be used."""
    named = _numbers(root / "sys/devices/cpu_core/cpus") & allowed
    sizes: dict[int, int] = {}
    with suppress(OSError, ValueError):
        capacities = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity" for cpu in allowed}
        sizes = {cpu: int(path.read_text()) for cpu, path in capacities.items()}
    large = {cpu for cpu, size in sizes.items() if size >= _SLOW * max(sizes.values())}
    return named or large or allowed


def _quota(root: Path) -> int | None:
    """The whole processors that the control groups of this process may use at once; None where nothing limits it.

    A group is limited by those above it, too. In a container the root of the mounted tree is often the container's own.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:cpu:/"]
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops, names = (("",), ("cpu.max",)) if not controllers else (("cpu", controllers), _OLD)
        groups = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        for folder in {root / "sys/fs/cgroup" / top / group for top in tops for group in groups}:
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                quotas += [max(1, quota // period)] if quota > 0 and period > 0 else []
    return min(quotas, default=None)


_OLD = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
"""Files of a control group of version 1: microseconds of processors that it may use in a period, and the period; in
version 2 both are in `cpu.max`."""


FORCED = "SPARSEPACK_ISA"
"""This environment variable names the instruction set to run, for tests and comparisons."""

_REMEDY = (
    "run `pip install --force-reinstall --no-deps --no-cache-dir sparsepack`, in its source folder with `.` in place "
    "of `sparsepack`, or use the reference backend"
)
"""Without --no-cache-dir pip installs again what it built without a compiler."""


_SOURCE = Path(__file__).parents[3]


def _kernels_elsewhere() -> str | None:
    """The folder on Python's path whose installed sparsepack has kernels, but is hidden by a checkout."""
    places = (place for place in sys.path if Path(place).resolve() != _SOURCE)
    return next((place for place in places if any(Path(place, "sparsepack/runtime/cpu").glob("_native*"))), None)


def native() -> Any:
    """The compiled module `sparsepack.runtime.cpu._native`. Raises `UserError` where it is missing or does not load."""
    try:
        return import_module("sparsepack.runtime.cpu._native")
    except ModuleNotFoundError as error:
        if (installed := _kernels_elsewhere()) is not None:
            raise UserError(
                f"sparsepack is imported from {_SOURCE}, which has no CPU kernels, while {installed} has them; start "
                "Python in another folder, or as `python -P`"
            ) from error
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

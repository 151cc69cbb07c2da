"""Where, when and with what a CPU benchmark ran, and what the memory delivered meanwhile."""

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsepack
from sparsepack.errors import UserError
from sparsepack.runtime.cpu.machine import cpu_info

_READ_BYTES = 5 << 28  # 1.25 GiB
_VERSIONS = ("torch", "transformers", "llama-cpp-python")


def setting() -> dict[str, Any]:
    """Machine, date, commit and versions."""
    return {
        "cpu": cpu_info(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "instruction_set": _instruction_set(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "sparsepack": sparsepack.__version__,
            **{name: version(name) for name in _VERSIONS},
        },
    }


def setting_line(found: dict[str, Any]) -> str:
    """`setting` for people."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"{found['date']}, {found['cores']} cores of {found['cpu']}, {found['memory_gib']} GiB, kernels "
        f"{found['instruction_set']}, load before {found['load_average']:.1f}, commit {found['commit']}; {versions}"
    )


def _instruction_set() -> str:
    from sparsepack.runtime.cpu.machine import instruction_set

    try:
        return instruction_set()
    except UserError:
        return "not built"


def _commit() -> str:
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown"
    return commit + (" and changes" if git(["git", "status", "--porcelain", "-uno"]).stdout.strip() else "")


def cpu_read_bandwidth(threads: int) -> float:
    """Bytes a second read from an array far larger than the caches: the fastest of several ways, each tried twice.

    What disturbs a read only slows it, and how a library reads may be slower than the memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = max(_READ_BYTES / _seconds(partial(read, threads)) for read in _ways() for _ in range(2))
    torch.set_num_threads(before)
    if _instruction_set() == "not built":
        return found
    from sparsepack.runtime.cpu.machine import native

    return max(found, float(native().read_bandwidth(_READ_BYTES, threads, 3)))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@cache
def _ways() -> list[Callable[[int], Any]]:
    memory = mmap.mmap(-1, _READ_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(memory, dtype=np.uint64)
    words[:] = 1
    array = torch.from_numpy(words.view(np.int64))
    floats = array.view(torch.float32)
    pool = ThreadPoolExecutor()

    def in_pieces(threads: int) -> list[Any]:
        return list(pool.map(np.bitwise_or.reduce, np.array_split(words, threads)))

    return [lambda threads: floats.max(), lambda threads: array.sum(), in_pieces]

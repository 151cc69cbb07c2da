"""What this process has of the machine."""

import os
import sys
from pathlib import Path


def cores() -> int:
    """The logical cores that this process may use: at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_so_far() -> int:
    """The most memory that this process had: bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not `getrusage`, whose figure counts the process that started this one, up to then.
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource  # not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10

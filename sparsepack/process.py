"""Starting Python processes, and what this process has of the machine: cores, memory, a folder for caches.

Python looks for modules in the working folder first where it is started with `-m` or `-c`: in the folder of a
downloaded model it would run that folder's code. Every Python process that we start is started by `python_module`.
"""

import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module by this Python, which imports nothing from the working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment and `variables`, for a Python process: neither that one nor one that it starts
    imports anything from the working folder."""
    # An empty entry means the working folder.
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1", **variables}


def exit_with_parent(parent: int) -> None:
    """From now on the system kills this process when the process `parent`, which started it, has ended; at once where
    it has. Linux alone does so: elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def cores() -> int:
    """The logical cores that this process may use: at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """The most memory that this process had: bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not `getrusage`, whose figure counts the process that started this one, up to then.
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    if sys.platform == "win32":
        import ctypes

        # PROCESS_MEMORY_COUNTERS: two DWORDs, PeakWorkingSetSize, seven more sizes; -1 is this process.
        counters = (ctypes.c_size_t * 9)()
        size = ctypes.sizeof(counters)
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(ctypes.c_void_p(-1), counters, size)
        return counters[1]
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def cache_folder() -> Path:
    """The folder `sparsepack` below $XDG_CACHE_HOME, or ~/.cache.

    Where the user has neither HOME nor an entry it lies below a device: nothing can be read or written there.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "sparsepack"
    try:
        return Path.home() / ".cache" / "sparsepack"
    except RuntimeError:
        return Path(os.devnull) / "sparsepack"

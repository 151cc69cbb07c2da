"""The most memory that a command takes, in a fork of a process that has imported what it needs."""

from pathlib import Path

from forks_for_tests import in_a_fork

THREADS = 2


def command_peak_bytes(*arguments: str) -> int:
    """The peak of resident memory of a `sparsepack` command, mapped files included, above what its imports take; Linux
    only."""
    found: int = in_a_fork(_more_bytes, arguments)
    print("above its imports:", found >> 20, "MiB for", *arguments[:2])
    return found


def _more_bytes(arguments: tuple[str, ...]) -> int:
    import torch

    import sparsepack.formats.verify  # noqa: F401 (what it takes is no command's)
    from sparsepack.cli import main

    torch.set_num_threads(THREADS)
    before = resident_bytes("VmRSS")
    main(list(arguments), standalone_mode=False)
    return resident_bytes("VmHWM") - before


def resident_bytes(name: str) -> int:
    """VmRSS, what this process has in memory, or VmHWM, the most that it had. Not `getrusage`: its peak counts the
    process that started this one, which may be a large test run."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

"""What the environment says of the workers of which this process is one. Nothing heavy is imported."""

import os
from contextlib import suppress
from pathlib import Path

from sparsepack.process import exit_with_parent

LAUNCHED = "SPARSEPACK_LAUNCHED_BY"
"""The process that started the workers (`--devices`), by its number; torchrun sets no such variable."""

DONE = "SPARSEPACK_DONE"
"""The file that a worker makes, when its work is done, for whom it was started by (`--devices`); torchrun has none."""

INTERRUPTED = ".interrupted"
"""That file has this suffix where a worker was interrupted and has said so."""

LOST = 20.0
"""A worker that gave no sign of life, or was stopped, for so many seconds is lost."""

_NAMES = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def several() -> bool:
    """Whether this process was started as one of several workers."""
    return workers_count() > 1


def several_machines() -> bool:
    """Whether some of the workers are on other machines than this one."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return several() and here.isdecimal() and int(here) < workers_count()


def missing() -> list[str]:
    """The variables without which one of several workers does not find the others, as far as they are not set."""
    return [name for name in _NAMES if name not in os.environ]


def worker_number() -> int:
    """The number of this worker, from 0; -1 where the environment gives none."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else -1


def workers_count() -> int:
    """How many workers there are."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 1


def number_here() -> int:
    """The number of this worker among those of its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def end_with_launcher() -> None:
    """End when the process that started this worker (`--devices`) does, whatever ends that one."""
    launcher = os.environ.get(LAUNCHED, "")
    if launcher.isdecimal():
        exit_with_parent(int(launcher))


def say_done() -> None:
    """Tell whoever started this worker that its work is done and its output out: from here on its end, whatever it is,
    takes nothing away. One that nobody started so has nobody to tell."""
    _leave("")


def say_interrupted() -> None:
    """Tell whoever started this worker that it has said on standard error what the interrupt left."""
    _leave(INTERRUPTED)


def _leave(suffix: str) -> None:
    if path := os.environ.get(DONE):
        with suppress(OSError):  # where not even an empty file can be made, the process's end alone tells
            Path(f"{path}{suffix}").touch()

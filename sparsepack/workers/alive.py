"""Signs of life: each worker gives one every few seconds, and ends when another one gives none any more.

A worker that dies closes its connections, which whoever waits for it sees at once. One that hangs, or whose machine is
gone, closes none; and whoever is at work waits for nobody: it looks whether another one has said that it fails.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparsepack.terminal import printable, tell
from sparsepack.workers.environment import LAUNCHED
from sparsepack.workers.workers import Link, Workers, failure

EVERY = 4.0
"""A sign is given after so many seconds."""

LOST = 20.0
"""A worker that gave none for so many seconds is lost."""

_LAST_WORD = 5.0  # seconds in which the main thread may come to an end and say more
_EXIT = 1
_GOES_ON = "; nothing is written, and the same command goes on"


@contextmanager
def signs_of_life(workers: Workers, link: Link) -> Iterator[None]:
    """Within the context, give signs of life and look for those of others, on a thread of its own.

    link -- to the same store as that of `workers`, but with a connection of its own
    """
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(workers, link, stop), name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(workers: Workers, link: Link, stop: threading.Event) -> None:
    seen = {other: ("", time.monotonic()) for other in range(workers.count) if other != workers.number}
    launcher = os.environ.get(LAUNCHED)
    beats = 0
    while not stop.wait(EVERY):
        if launcher is not None and str(os.getppid()) != launcher:
            os._exit(_EXIT)  # whoever started the workers is gone, perhaps before this thread began
        beats += 1
        try:
            link.set(f"alive/{workers.number}", str(beats))
            if (failed := failure(link)) is not None and failed["worker"] != workers.number:
                _end(f"{workers.names[failed['worker']]} failed: {failed['line']}", stop)
                return
            for other in seen:
                beat = link.get(f"alive/{other}") or ""
                if beat != seen[other][0]:
                    seen[other] = beat, time.monotonic()
        except RuntimeError:
            _end(f"{workers.names[0]} is gone{_GOES_ON}", stop)
            return
        for other, (_, when) in seen.items():
            if time.monotonic() - when > LOST:
                _end(f"{workers.names[other]} has given no sign of life for {LOST:.0f} seconds{_GOES_ON}", stop)
                return


def _end(why: str, stop: threading.Event) -> None:
    """End this process: its main thread may wait in a library for whom nobody can stop."""
    if stop.wait(_LAST_WORD):  # the others may just have come to their end, or this one's main thread knows more
        return
    tell(f"sparsepack: {printable(why)}", sys.stderr)
    os._exit(_EXIT)

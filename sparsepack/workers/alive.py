"""Signs of life: each worker gives one every few seconds, and ends when another one gives none any more.

A worker that dies closes its connections, which whoever waits for it sees at once. One that hangs, or whose machine is
gone, closes none; and whoever is at work waits for nobody: it looks whether another one has said that it fails. The
store in which they look is served by one of them: a call of the store that does not come back is a sign, too.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sparsepack.terminal import printable, tell
from sparsepack.workers.exchange import Exchange, Link, failure
from sparsepack.workers.launch import LAUNCHED, LOST

EVERY = 4.0
"""A sign is given after so many seconds."""

_LAST_WORD = 5.0  # seconds in which the main thread may come to an end and say more
_EXIT = 1
_GOES_ON = "; nothing is written, and the same command goes on"


class Calls(Protocol):
    """What counts its calls of a store: `calls` grows when one begins and when it comes back, so it is odd between."""

    calls: int


@contextmanager
def store_answers(name: str, links: Sequence[Calls]) -> Iterator[None]:
    """Within the context, end this process where a call of the store does not come back for `LOST` seconds.

    name -- who serves the store, for the line that says so
    """
    with _thread(_watch_calls, name, links, name="calls of the store"):
        yield


def _watch_calls(name: str, links: Sequence[Calls], stop: threading.Event) -> None:
    seen = [(link.calls, 0) for link in links]
    while not stop.wait(EVERY):
        # Rounds are counted, not seconds: this process may have been stopped itself.
        seen = [
            (link.calls, rounds + 1 if link.calls == calls and calls % 2 else 0)
            for link, (calls, rounds) in zip(links, seen, strict=True)
        ]
        if any((rounds + 1) * EVERY >= LOST for _, rounds in seen):  # it began before the round that saw it
            _end(f"{name} has given no sign of life for {LOST:.0f} seconds{_GOES_ON}", stop)
            return


@contextmanager
def signs_of_life(workers: Exchange, link: Link) -> Iterator[None]:
    """Within the context, give signs of life and look for those of others, on a thread of its own.

    link -- to the same store as that of `workers`, but with a connection of its own
    """
    with _thread(_watch, workers, link, name="signs of life"):
        yield


@contextmanager
def _thread(work: Callable[..., None], *given: object, name: str) -> Iterator[None]:
    """Within the context a thread does `work`, which ends when the event is set that it is given last."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(*given, stop), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(workers: Exchange, link: Link, stop: threading.Event) -> None:
    seen = {other: ("", time.monotonic()) for other in range(workers.world_size) if other != workers.rank}
    launcher = os.environ.get(LAUNCHED)
    beats = 0
    while not stop.wait(EVERY):
        if launcher is not None and str(os.getppid()) != launcher:
            os._exit(_EXIT)  # whoever started the workers is gone, perhaps before this thread began
        beats += 1
        try:
            link.set(f"alive/{workers.rank}", str(beats))
            if (failed := failure(link)) is not None and failed["worker"] != workers.rank:
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

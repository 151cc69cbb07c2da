"""What is going on, on stderr so that results on stdout stay clean.

On a terminal there is a bar with the time that is left. Elsewhere (a pipe, a log file, a CI job) there is one line
every 30 seconds as long as something goes on; a run that takes less says nothing. Work that will take longer than five
minutes says so as soon as its first part is done, and what would make it shorter. `be_quiet` silences all of it, and
notes.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from sparsepack.terminal import printable, tell

EVERY = 30.0
"""Two lines are at least this many seconds apart where stderr is no terminal."""
LONG = 300.0
"""Work that takes more seconds than this is announced."""
_TIMED = 2.0
"""A part of it is timed for at least this many seconds."""
_WARM = 10.0
"""Libraries and devices are ready within so many seconds; a first part that takes longer counts as the others do."""


@dataclass(frozen=True)
class Shorter:
    """What would make work shorter: fewer of what an option counts. The time is in proportion to `now`."""

    option: str
    now: int


class Advance(Protocol):
    """Report `steps` more units of work done."""

    def __call__(self, steps: int = 1) -> None: ...


class _Work:
    """Something that goes on. total: None where it is not known how much there is to do."""

    def __init__(
        self,
        label: str,
        total: int | None = None,
        done: int = 0,
        first: int = 1,
        shorter: Shorter | None = None,
    ) -> None:
        self.label, self.total, self.done, self.before = label, total, done, done
        self.first, self.shorter, self.announced = first, shorter, False
        self.began = time.monotonic()
        self.timed_from: tuple[float, int] | None = None

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        spent, now = time.monotonic() - self.began, self.done - self.before
        if self.timed_from is None:
            self.timed_from = (spent, now) if spent < _WARM else (0.0, 0)
        start, units = self.timed_from
        if not self.announced and self.total is not None and now >= units + self.first and spent >= start + _TIMED:
            self.announced = True
            whole = spent + (spent - start) / (now - units) * (self.total - self.done)
            if whole > LONG:
                measured = f"by its first {duration(spent)}"
                say(f"{self.label}: takes about {duration(whole)} in all, {measured}{self._advice(whole)}")

    def _advice(self, whole: float) -> str:
        if self.shorter is None:
            return ""
        fewer = int(self.shorter.now * LONG / whole)
        if fewer < 1:
            return ""
        return f"; {self.shorter.option} {fewer}, now {self.shorter.now}, would take about {duration(LONG)}"

    def line(self) -> str:
        spent = time.monotonic() - self.began
        if self.total is None:
            return f"{self.label}: for {duration(spent)} now"
        done, now = min(self.done, self.total), self.done - self.before
        left = f"about {duration(spent / now * (self.total - done))} left" if now > 0 else "time left unknown as yet"
        share = f"{100 * done / max(self.total, 1):.0f} %"
        return f"{self.label}: {done:,}/{self.total:,} ({share}) after {duration(spent)}, {left}"


_going_on: list[_Work] = []
"""The innermost of the steps that go on stands last."""
_quiet = False


def be_quiet(quiet: bool) -> None:
    """From now on, show no progress and no notes; or show them again. Errors and results are shown in any case."""
    global _quiet
    _quiet = quiet


@contextmanager
def progress(
    label: str, total: int, done: int = 0, first: int = 1, shorter: Shorter | None = None
) -> Iterator[Advance]:
    """Show how `total` units are worked off, `done` of them finished already; yields the function that advances it.

    first -- so many units say how long all will take: more than one where single ones differ, such as the steps that
             make up a block
    """
    work = _Work(label, total, done, first, shorter)
    with _told(work), _bar(work) as advance:
        yield advance


@contextmanager
def going_on(label: str) -> Iterator[None]:
    """Say now and then, if stderr is no terminal, that something goes on whose extent is not known."""
    with _told(_Work(label)):
        yield


def say(*lines: str) -> None:
    """Notes: lines on stderr, unless it is to be quiet; nothing where there are none."""
    for line in () if _quiet else lines:
        tell(printable(line), sys.stderr)


def counted(number: int, thing: str) -> str:
    """In words: 1 thread, 2 threads."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """In words: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def _told(work: _Work) -> Iterator[None]:
    """Within, the outermost work's thread tells about the innermost one."""
    first = not (_going_on or _quiet or sys.stderr.isatty())
    _going_on.append(work)
    stop = threading.Event()
    thread = threading.Thread(target=_tell, args=(stop,), name="progress", daemon=True)
    try:
        if first:
            with contextlib.suppress(RuntimeError):  # no memory for a thread: then nothing is told
                thread.start()
        yield
    finally:
        _going_on.remove(work)
        stop.set()
        if thread.is_alive():
            thread.join()


def _tell(stop: threading.Event) -> None:
    while not stop.wait(EVERY):
        # A pipe whose reader has gone is noticed by whoever writes results.
        with contextlib.suppress(OSError, IndexError):
            say(_going_on[-1].line())


@contextmanager
def _bar(work: _Work) -> Iterator[Advance]:
    if _quiet or not sys.stderr.isatty():
        yield work.advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(printable(work.label), total=work.total, completed=work.done)

        def advance(steps: int = 1) -> None:
            work.advance(steps)
            bars.advance(task, steps)

        yield advance

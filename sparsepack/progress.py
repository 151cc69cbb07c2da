"""What is going on, on stderr so that results on stdout stay clean.

On a terminal there is a bar with the time that is left. Elsewhere (a pipe, a log file, a CI job), and where there is no
bar yet, there is a line after five seconds and one every 30 as long as something goes on; a run that takes less says
nothing. The time left is said once the pace is steady, not before. Work that will take longer than five minutes says so
then, and what would make it shorter. `be_quiet` silences all of it, and notes.
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

FIRST, EVERY = 5.0, 30.0
"""So many seconds pass before the first line, and between two lines."""
LONG = 300.0
"""Work that takes more seconds than this is announced."""
_TIMED = 10.0
"""The pace is measured over at least this many seconds."""
_STEADY = 0.25
"""It is steady where the pace of its later half differs by less than this share from that of the earlier one."""
_MOST_MARKS = 64


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
        self.shown = False
        self.began = time.monotonic()
        self.marks: list[tuple[float, int]] = []  # seconds spent when so many units were done

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        spent, units = time.monotonic() - self.began, self.done - self.before
        if units // self.first > (self.marks[-1][1] // self.first if self.marks else 0):
            self.marks.append((spent, units))
            if len(self.marks) > _MOST_MARKS:  # the first and the last one stay
                del self.marks[1:-1:2]
        if not self.announced and (left := self.left()) is not None:
            self.announced = True
            if spent + left > LONG:
                measured = f"by its first {duration(spent)}"
                say(
                    f"{self.label}: takes about {duration(spent + left)} in all, {measured}{self._advice(spent + left)}"
                )

    def left(self) -> float | None:
        """Return the seconds that are left; None while the pace is not steady.

        The first units are left out: libraries and devices get ready meanwhile, and files are read.
        """
        if self.total is None or len(self.marks) < 3:
            return None
        (start, units), (end, last) = self.marks[0], self.marks[-1]
        middle, half = min(self.marks[1:-1], key=lambda mark: abs(mark[0] - (start + end) / 2))
        if end - start < _TIMED or not start < middle < end:
            return None
        earlier, later = (half - units) / (middle - start), (last - half) / (end - middle)
        if abs(later / earlier - 1) > _STEADY:
            return None
        pace, waiting = (last - units) / (end - start), time.monotonic() - self.began - end
        if waiting > max(_STEADY * (end - start), 2 * self.first / pace):  # other units have begun, which take longer
            return None
        return max(0.0, (self.total - self.before - last) / pace - waiting)

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
        done, left = min(self.done, self.total), self.left()
        share = f"{100 * done / max(self.total, 1):.0f} %"
        rest = "" if left is None else f", about {duration(left)} left"
        return f"{self.label}: {done:,}/{self.total:,} ({share}) after {duration(spent)}{rest}"


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
def activity(label: str) -> Iterator[None]:
    """Say now and then that something goes on whose extent is not known."""
    with _told(_Work(label)):
        yield


def say(*lines: str) -> None:
    """Notes: lines on stderr, unless it is to be quiet; nothing where there are none."""
    for line in () if _quiet else lines:
        tell(printable(line), sys.stderr)


def format_count(number: int, thing: str) -> str:
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
    first = not (_going_on or _quiet)
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
    pause = FIRST
    while not stop.wait(pause):
        pause = EVERY
        # A pipe whose reader has gone is noticed by whoever writes results.
        with contextlib.suppress(OSError, IndexError):
            if not any(work.shown for work in _going_on):
                say(_going_on[-1].line())


@contextmanager
def _bar(work: _Work) -> Iterator[Advance]:
    if _quiet or not sys.stderr.isatty():
        yield work.advance
        return
    work.shown = True
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(printable(work.label), total=work.total, completed=work.done, left="")

        def advance(steps: int = 1) -> None:
            work.advance(steps)
            left = work.left()
            bars.update(task, advance=steps, left="" if left is None else f"about {duration(left)} left")

        yield advance

"""The hash that says which weights a checkpoint has: taken by itself, or beside other work on the same files."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from sparsepack.errors import CheckpointError
from sparsepack.files.hashing import AHEAD, PENDING_HASH, Hashing, Pace
from sparsepack.files.stored import shown
from sparsepack.workers.exchange import AllGather
from sparsepack.workers.launch import number_here

T = TypeVar("T")


class SourceHash:
    """The hash of a checkpoint's files as they are when it is opened, taken once.

    files   -- in the order that counts
    combine -- makes one hash of their SHA-256
    """

    def __init__(self, files: Sequence[Path], combine: Callable[[Sequence[str]], str]) -> None:
        self._combine = combine
        self._opened = {file: _state(file) for file in files}
        size = sum(state[2] for state in self._opened.values() if state)
        self._pace = Pace(len(self._opened)) if size > AHEAD else None
        self._numbers = {file: number for number, file in enumerate(self._opened)}
        self._known: str | None = None
        self._begun: Hashing | None = None
        self._waits: Callable[[], str] | None = None  # for what is being taken

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order that counts."""
        return tuple(self._opened)

    def count_read(self, file: Path, nbytes: int) -> None:
        """Count bytes of one of the files as read: those of large models are hashed when they are read anyway."""
        if self._pace is not None:
            self._pace.count(self._numbers[file], nbytes)

    def begin(self) -> None:
        """Begin to take the hash, beside whatever is done until it is asked for: importing transformers takes as long.
        Of workers only the first of a machine begins, since the others are told."""
        if self._known is None and self._begun is None and number_here() == 0:
            self._begun = Hashing(self._opened, self._pace)

    def sha256(self) -> str:
        """The hash. Raises `CheckpointError` where a file cannot be read, or has changed since it was opened."""
        if self._waits is not None:
            return self._waits()
        with self.meanwhile() as sha256:
            return sha256()

    @property
    def so_far(self) -> str:
        """The hash where it has been taken, else `PENDING_HASH`."""
        return self._known or PENDING_HASH

    def share_beside(self, all_gather: AllGather, work: Callable[[], T]) -> T:
        """Take the hash once on each machine while all workers do other work; returns what that gives.

        Raises as `sha256` does, and `WorkerLost`.
        """
        with self.meanwhile(all_gather) as sha256:
            made = work()
            sha256()
        return made

    @contextmanager
    def meanwhile(self, all_gather: AllGather = lambda value: [value]) -> Iterator[Callable[[], str]]:
        """Take the hash while the context lasts, unless it is known; yields what waits for it. Of several workers each
        calls that at the same point of their work; the first of those that have opened the same files on a machine
        takes the hash, and there `sha256` waits for it, too.

        Waiting raises `CheckpointError` where a file cannot be read, or has changed since it was opened: other weights
        may have been read than were hashed. So does the context where its work fails over such a file. Raises
        `WorkerLost`.
        """
        opened = [[str(file.resolve()), state] for file, state in self._opened.items()]
        here = [socket.gethostname(), opened, uuid4().hex]
        all_opened = all_gather(here)
        taker = next(n for n, there in enumerate(all_opened) if there[:2] == here[:2])
        takes, told = all_opened[taker] == here, False
        with self._hashing(takes) as taking:

            def taken() -> str:
                try:
                    known = self._known or self._combine(taking.sha256())
                except OSError as error:
                    raise CheckpointError(f"the weights cannot be read ({shown(error)}); are they whole?") from error
                self._check_unchanged()
                self._known, self._begun = known, None
                return known

            def shared() -> str:
                nonlocal told
                if not told:
                    self._known, told = all_gather(taken() if takes else None)[taker], True
                return taken()

            before, self._waits = self._waits, taken if takes else self._waits
            try:
                yield shared
            except Exception:
                self._check_unchanged()  # else this is why
                raise
            finally:
                self._waits = before

    @contextmanager
    def _hashing(self, takes: bool) -> Iterator[Hashing]:
        """What was begun, else the hashing of the files, or of none, while the context lasts."""
        if takes and self._begun is not None:
            yield self._begun
            return
        taking = Hashing(self._opened if takes and self._known is None else (), self._pace)
        try:
            yield taking
        finally:
            taking.abandon()

    def _check_unchanged(self) -> None:
        for file, state in self._opened.items():
            if _state(file) != state:
                raise CheckpointError(f"{file}: changed since it was opened; wait until it is whole, then repeat")


def _state(file: Path) -> list[int] | None:
    """What changes with a file's content; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]

"""The hash that says which weights a checkpoint has: taken by itself, or beside other work on the same files."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sparsepack.errors import CheckpointError
from sparsepack.files.hashing import TO_COME, hashing
from sparsepack.files.stored import shown
from sparsepack.workers.workers import ALONE, Workers

T = TypeVar("T")


class SourceHash:
    """The hash of a checkpoint's files as they are when it is opened, taken once.

    files   -- in the order that counts
    combine -- makes one hash of their SHA-256
    """

    def __init__(self, files: Sequence[Path], combine: Callable[[Sequence[str]], str]) -> None:
        self._combine = combine
        self._opened = {file: _state(file) for file in files}
        self._known: str | None = None
        self._waits: Callable[[], str] | None = None  # for what is being taken

    def sha256(self) -> str:
        """The hash. Raises `CheckpointError` where a file cannot be read, or has changed since it was opened."""
        if self._waits is not None:
            return self._waits()
        with self.meanwhile() as sha256:
            return sha256()

    @property
    def so_far(self) -> str:
        """The hash where it has been taken, else `TO_COME`."""
        return self._known or TO_COME

    def share(self, workers: Workers) -> None:
        """Take the hash once on each machine: of workers that have opened the same files there, the first one takes it.

        Raises as `sha256` does, and `WorkerLost`.
        """
        if workers.count > 1:  # alone, it is taken when somebody asks
            self.share_beside(workers, lambda: None)

    def share_beside(self, workers: Workers, work: Callable[[], T]) -> T:
        """Do as `share` does, also for one worker alone, while each does other work; returns what that gives."""
        with self.meanwhile(workers) as sha256:
            made = work()
            sha256()
        return made

    @contextmanager
    def meanwhile(self, workers: Workers = ALONE) -> Iterator[Callable[[], str]]:
        """Take the hash while the context lasts, unless it is known; yields what waits for it. Of several workers each
        calls that at the same point of their work; the first of those on a machine takes the hash, and there `sha256`
        waits for it, too.

        Waiting raises `CheckpointError` where a file cannot be read, or has changed since it was opened: other weights
        may have been read than were hashed. So does the context where its work fails over such a file. Raises
        `WorkerLost`.
        """
        taker, told = self._taker(workers), False
        takes = taker == workers.number
        with hashing(self._opened if takes and self._known is None else ()) as digests:

            def taken() -> str:
                try:
                    known = self._known or self._combine(digests())
                except OSError as error:
                    raise CheckpointError(f"the weights cannot be read ({shown(error)}); are they whole?") from error
                self._check_unchanged()
                self._known = known
                return known

            def shared() -> str:
                nonlocal told
                if not told:
                    self._known, told = workers.told(taken() if takes else None)[taker], True
                return taken()

            before, self._waits = self._waits, taken if takes else self._waits
            try:
                yield shared
            except Exception:
                self._check_unchanged()  # else this is why
                raise
            finally:
                self._waits = before

    def _taker(self, workers: Workers) -> int:
        """The first of the workers that have opened the same files on the same machine as this one."""
        here = [socket.gethostname(), [[str(file.resolve()), state] for file, state in self._opened.items()]]
        files = workers.told(here)
        return files.index(files[workers.number])

    def _check_unchanged(self) -> None:
        for file, state in self._opened.items():
            if _state(file) != state:
                raise CheckpointError(f"{file}: changed since it was opened; wait until it is whole, then repeat")


def _state(file: Path) -> tuple[int, ...] | None:
    """What changes with a file's content; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

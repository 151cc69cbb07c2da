"""The hash that says which weights a checkpoint has: taken by itself, or beside other work on the same files."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sparsepack.errors import CheckpointError
from sparsepack.files.hashing import TO_COME, hashing
from sparsepack.files.stored import shown
from sparsepack.workers.workers import Workers

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

    def sha256(self) -> str:
        """The hash. Raises `CheckpointError` where a file cannot be read, or has changed since it was opened."""
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
        if workers.count > 1:
            self.share_beside(workers, lambda: None)

    def share_beside(self, workers: Workers, work: Callable[[], T]) -> T:
        """Do as `share` does, also for one worker alone, while each does other work; returns what that gives."""
        if workers.count == 1 or self._known is not None:
            with self.meanwhile() as sha256:
                made = work()
                sha256()
            return made
        files = workers.told(
            [socket.gethostname(), [[str(file.resolve()), state] for file, state in self._opened.items()]]
        )
        taker = files.index(files[workers.number])
        if taker == workers.number:
            with self.meanwhile() as sha256:
                made = work()
                digests = workers.told(sha256())
        else:
            made = work()
            digests = workers.told(None)
        self._known = digests[taker]
        return made

    @contextmanager
    def meanwhile(self) -> Iterator[Callable[[], str]]:
        """Take the hash while the context lasts, unless it is known; yields what waits for it.

        Waiting raises `CheckpointError` where a file cannot be read, or has changed since it was opened: other weights
        may have been read than were hashed. So does the context where its work fails over such a file.
        """
        with hashing(self._opened if self._known is None else ()) as digests:

            def sha256() -> str:
                try:
                    known = self._known or self._combine(digests())
                except OSError as error:
                    raise CheckpointError(f"the weights cannot be read ({shown(error)}); are they whole?") from error
                self._check_unchanged()
                self._known = known
                return known

            try:
                yield sha256
            except Exception:
                self._check_unchanged()  # else this is why
                raise

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

"""The hash that says which weights a checkpoint has: taken by itself, or beside other work on the same files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparsepack.errors import CheckpointError
from sparsepack.files.hashing import hashing


class SourceHash:
    """The hash of a checkpoint's files, taken once.

    files   -- in the order that counts
    combine -- makes one hash of their SHA-256
    """

    def __init__(self, files: Sequence[Path], combine: Callable[[Sequence[str]], str]) -> None:
        self._files, self._combine = files, combine
        self._known: str | None = None

    def sha256(self) -> str:
        """The hash. Raises `CheckpointError` where a file changes before it is known."""
        with self.meanwhile() as sha256:
            return sha256()

    @contextmanager
    def meanwhile(self) -> Iterator[Callable[[], str]]:
        """Take the hash while the context lasts, unless it is known; yields what waits for it.

        Waiting raises `CheckpointError` where a file has changed since the context began, whose work may have read
        other weights than were hashed.
        """
        before = [_state(file) for file in self._files]
        with hashing(self._files if self._known is None else ()) as digests:

            def sha256() -> str:
                known = self._known or self._combine(digests())
                for file, state in zip(self._files, before, strict=True):
                    if _state(file) != state:
                        raise CheckpointError(f"{file}: changed while it was read; wait until it is whole, then repeat")
                self._known = known
                return known

            yield sha256


def _state(file: Path) -> tuple[int, ...] | None:
    """What changes with a file's content; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

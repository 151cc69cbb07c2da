"""SHA-256 over files and values."""

import hashlib
import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

NO_HASH = "0" * 64
"""These 64 zeros stand where a SHA-256 will be written."""

PENDING_HASH = "?" * 64
"""These stand where the SHA-256 of what is still being hashed will be written."""

_LARGE = 1 << 26
_PIECE = 1 << 24
"""Between two pieces a thread asks for Python's interpreter, which work beside needs."""
_LOOK = 0.005
"""Seconds between two looks of a thread that waits for others."""


def sha256_bytes(data: bytes | memoryview) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    return _sha256_file(path, Event())


def sha256_of_pieces(path: Path) -> str:
    """Hex SHA-256 over those of a file's pieces of `_LARGE` bytes, hashed side by side: one thread hashes more slowly
    than most disks write."""
    starts = range(0, max(path.stat().st_size, 1), _LARGE)
    with ThreadPoolExecutor(min(len(starts), 16, os.cpu_count() or 1)) as pool:
        return combine_digests(pool.map(lambda start: _sha256_file(path, Event(), None, start, _LARGE), starts))


def combine_digests(digests: Iterable[str]) -> str:
    """Hex SHA-256 over digests."""
    return sha256_bytes("".join(digests).encode())


AHEAD = 1 << 30
"""So many bytes of a file may be hashed before others read them; most machines keep as many in memory."""


class Pace:
    """How far the hashing of files may be: where others read them too, not so far ahead that the system has forgotten
    what was read when they come to it, and the disk must read it twice. Forks of this process count here, too.
    """

    def __init__(self, files: int) -> None:
        self._read = memoryview(mmap.mmap(-1, 8 * max(files, 1))).cast("Q")
        self._open = Event()

    def count(self, number: int, nbytes: int) -> None:
        """Count bytes of a file as read by others. Of counts by two processes at the same time one may be lost."""
        self._read[number] += nbytes

    def open(self) -> None:
        """Hash on without regard to others: they have come to their end, or wait for the hash."""
        self._open.set()

    def most(self, number: int) -> float:
        """Up to which byte a file may be hashed by now. One that nobody has begun to read waits, but for the first."""
        read = self._read[number]
        return float("inf") if self._open.is_set() else read + AHEAD if read or number == 0 else 0


class Hashing:
    """Hashes files beside other work, several side by side: one thread hashes more slowly than most disks read.

    pace -- how far it may be; None: nobody else reads the files

    Its threads end with the process, or when nobody has this object any more: whoever leaves early, an interrupted user
    for one, does not wait for the rest of a shard.
    """

    def __init__(self, paths: Iterable[Path], pace: Pace | None = None) -> None:
        self._abandoned, self._pace = Event(), pace
        self._digests: list[Future[str]] = []
        left: deque[tuple[int, Path, Future[str]]] = deque()
        for number, path in enumerate(paths):
            self._digests.append(Future())
            left.append((number, path, self._digests[-1]))
        threads = min(16, os.cpu_count() or 1, len(left))
        how = {"target": _hash_all, "args": (left, self._abandoned, pace), "name": "hashing", "daemon": True}
        self._threads = [Thread(**how) for _ in range(threads)]  # type: ignore[arg-type]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._abandoned.set)

    def sha256(self) -> list[str]:
        """Wait for the hex SHA-256 of each, in the given order. Raises OSError for the first that cannot be read."""
        if self._pace is not None:
            self._pace.open()
        return [digest.result() for digest in self._digests]

    def abandon(self) -> None:
        """Go on no longer, and close the files. `sha256` must not be asked for after that."""
        self._abandoned.set()
        for thread in self._threads:
            thread.join()


def _hash_all(left: deque[tuple[int, Path, Future[str]]], abandoned: Event, pace: Pace | None) -> None:
    while not abandoned.is_set():
        try:
            number, path, digest = left.popleft()
        except IndexError:
            return
        if pace is not None and pace.most(number) == 0:  # another one may have been begun
            left.append((number, path, digest))
            abandoned.wait(_LOOK)
            continue
        try:
            wait = None if pace is None else partial(_wait, pace, number, abandoned)
            digest.set_result(_sha256_file(path, abandoned, wait))
        except Exception as error:
            digest.set_exception(error)


def _wait(pace: Pace, number: int, abandoned: Event, end: int) -> None:
    while end > pace.most(number) and not abandoned.wait(_LOOK):
        pass


def _sha256_file(
    path: Path,
    abandoned: Event,
    wait: Callable[[int], None] | None = None,
    start: int = 0,
    most: int | None = None,
) -> str:
    """Hash a file from `start` on, so many bytes at most.

    wait -- returns when the file may be read up to a byte; None: it may be from the beginning
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        left = most
        while not abandoned.is_set():
            if wait is not None:
                wait(min(file.tell() + _PIECE, size))
            count = file.readinto(buffer if left is None else buffer[:left])
            if not count:
                break
            digest.update(buffer[:count])
            left = None if left is None else left - count
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of the order of its keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode())

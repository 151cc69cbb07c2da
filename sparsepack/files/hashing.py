"""SHA-256 over files and values."""

import hashlib
import json
import os
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
        return combine_digests(pool.map(lambda start: _sha256_file(path, Event(), start, _LARGE), starts))


def combine_digests(digests: Iterable[str]) -> str:
    """Hex SHA-256 over digests."""
    return sha256_bytes("".join(digests).encode())


class Hashing:
    """Hashes files beside other work, several side by side: one thread hashes more slowly than most disks read.

    Its threads end with the process, or when nobody has this object any more: whoever leaves early, an interrupted user
    for one, does not wait for the rest of a shard.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._abandoned = Event()
        self._digests: list[Future[str]] = []
        left: deque[tuple[Path, Future[str]]] = deque()
        for path in paths:
            self._digests.append(Future())
            left.append((path, self._digests[-1]))
        threads = min(16, os.cpu_count() or 1, len(left))
        how = {"target": _hash_all, "args": (left, self._abandoned), "name": "hashing", "daemon": True}
        self._threads = [Thread(**how) for _ in range(threads)]  # type: ignore[arg-type]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._abandoned.set)

    def sha256(self) -> list[str]:
        """Wait for the hex SHA-256 of each, in the given order. Raises OSError for the first that cannot be read."""
        return [digest.result() for digest in self._digests]

    def abandon(self) -> None:
        """Go on no longer, and close the files. `sha256` must not be asked for after that."""
        self._abandoned.set()
        for thread in self._threads:
            thread.join()


def _hash_all(left: deque[tuple[Path, Future[str]]], abandoned: Event) -> None:
    while not abandoned.is_set():
        try:
            path, digest = left.popleft()
        except IndexError:
            return
        try:
            digest.set_result(_sha256_file(path, abandoned))
        except Exception as error:
            digest.set_exception(error)


def _sha256_file(path: Path, abandoned: Event, start: int = 0, most: int | None = None) -> str:
    """Hash a file from `start` on, so many bytes at most."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = most
        while not abandoned.is_set() and (count := file.readinto(buffer if left is None else buffer[:left])):
            digest.update(buffer[:count])
            left = None if left is None else left - count
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of the order of its keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode())

"""SHA-256 over files and values."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

NO_HASH = "0" * 64
"""These 64 zeros stand where a SHA-256 will be written."""

TO_COME = "?" * 64
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
        return combined(pool.map(lambda start: _sha256_file(path, Event(), start, _LARGE), starts))


def combined(digests: Iterable[str]) -> str:
    """Hex SHA-256 over digests."""
    return sha256_bytes("".join(digests).encode())


@contextmanager
def hashing(paths: Iterable[Path]) -> Iterator[Callable[[], list[str]]]:
    """Hash files while the context lasts, several side by side: one thread hashes more slowly than most disks read.

    Yields what waits for the hex SHA-256 of each, in the given order, and raises OSError for the first that cannot be
    read. Whoever leaves without it, an interrupted user for one, need not wait for the rest of a shard.
    """
    abandoned = Event()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        try:
            jobs = [pool.submit(_sha256_file, path, abandoned) for path in paths]
            yield lambda: [job.result() for job in jobs]
        finally:
            abandoned.set()
            pool.shutdown(cancel_futures=True)


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

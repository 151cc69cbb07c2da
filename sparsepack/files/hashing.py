"""SHA-256 over files and values."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def sha256_bytes(data: bytes | memoryview) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Iterable[Path]) -> str:
    """Hex SHA-256 over the digests of several files in the given order: one file's name does not matter."""
    total = hashlib.sha256()
    for path in paths:
        total.update(sha256_file(path).encode())
    return total.hexdigest()


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of the order of its keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode())

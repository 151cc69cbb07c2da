"""Outputs that appear whole or not at all: written under a temporary name beside the target, then renamed."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse an output that exists (unless `overwrite`) or whose folder does not, before any work is done for it."""
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; give another name or --overwrite")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: the folder {path.absolute().parent} does not exist; create it first")


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success it is synced and renamed to `path`, on any failure removed.

    Raises `OutputError` where the output exists or the disk refuses it (full, read-only, no permission).
    """
    check_output(path, overwrite)
    temporary = path.absolute().parent / f".{path.name}.partial-{os.getpid()}"
    try:
        with _disk_errors(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; on success it is renamed to `path` (replacing it if `overwrite`), else removed."""
    check_output(path, overwrite)
    temporary = path.absolute().parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with _disk_errors(path):
            temporary.mkdir()
            yield temporary
            if path.exists():
                retired = temporary.with_name(f"{temporary.name}.old")
                path.rename(retired)
                temporary.rename(path)
                _remove(retired)
            else:
                temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically, replacing what is there."""
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(
                f"{path}: the disk is full ({error.strerror}); nothing was kept: free some space and run again"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        raise

"""Outputs that appear whole or not at all: written under a temporary name beside the target, then renamed."""

import errno
import glob
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError


def check_output(path: Path, overwrite: bool, folder: bool = False, marker: str | None = None) -> None:
    """Refuse an output that exists (unless `overwrite`), or whose folder does not or cannot be written, before any work
    is done for it.

    Even `overwrite` replaces only a file by a file, and a folder by a folder: an empty one, or one that holds a file
    named `marker` where that is given.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OutputError(f"{path}: a device or the like, which would be replaced; expected the name of a file")
    if path.exists() and path.is_dir() != folder:
        is_a, expected = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise OutputError(f"{path}: a {is_a}; expected the name of a {expected}")
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; give another name or --overwrite")
    if marker and path.exists() and any(path.iterdir()) and not (path / marker).is_file():
        raise OutputError(f"{path}: a folder without {marker}; it is not replaced, give another name")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"{path}: the folder {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: cannot be written, since the folder {parent} cannot; name another")
    if not path.exists():
        try:  # some folders, those of /proc for one, say that they can be written
            tempfile.TemporaryFile(dir=parent).close()
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror}); name another folder") from error


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success it is synced and renamed to `path`, on any failure removed.

    Raises `OutputError` where the output exists or the disk refuses it (full, read-only, no permission).
    """
    check_output(path, overwrite)
    temporary = _temporary(path)
    try:
        with _disk_errors(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        _remove(temporary)


@contextmanager
def atomic_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; on success it is renamed to `path` (replacing it if `overwrite`), else removed.

    Raises `OutputError` as `atomic_file` does.
    """
    check_output(path, overwrite, folder=True)
    temporary = _temporary(path)
    _remove(temporary)
    try:
        with _disk_errors(path):
            temporary.mkdir()
            yield temporary
            _swap(temporary, path)
    finally:
        _remove(temporary)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically, replacing what is there."""
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_bytes(_encoded(json.dumps(value, indent=2, ensure_ascii=False)) + b"\n")


def _encoded(text: str) -> bytes:
    """UTF-8, with JSON's escapes for halves of characters, which names of files may hold."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text).encode()


def write_bytes(path: Path, value: bytes) -> None:
    """Write `value`, atomically, replacing what is there."""
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_bytes(value)


def _temporary(path: Path) -> Path:
    """A name beside `path` that says whose it is: a process of this machine or container. What killed ones left there
    is removed."""
    parent, start = path.absolute().parent, f".{path.name}.partial-{_machine()}-"
    for left in parent.glob(f"{glob.escape(start)}*"):
        process = left.name.removeprefix(start)
        if process.isdecimal() and not _runs(int(process)):
            _remove(left)
    return parent / f"{start}{os.getpid()}"


def _machine() -> str:
    """Where a process has a number of its own: containers may share a machine's name, but not its processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        namespace = ""
    return re.sub(r"\W+", "-", f"{platform.node()[:32]}-{namespace}").strip("-")


def _runs(process: int) -> bool:
    if os.name == "nt":  # where a signal of 0 is none
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _remove(path: Path) -> None:
    """A file or a folder, if it is there and the disk lets go of it."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _swap(temporary: Path, path: Path) -> None:
    """Put the folder `temporary` in the place of `path`, which keeps what it held if that fails."""
    target = path.resolve()  # a link to a folder stays a link
    retired = temporary.with_name(f"{temporary.name}.old")
    exists = target.exists()
    if exists:
        target.rename(retired)
    try:
        temporary.rename(target)
    except BaseException:
        if exists:
            retired.rename(target)
        raise
    if exists:
        shutil.rmtree(retired)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(f"{path}: the disk is full ({error.strerror}); free some space and run again") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        raise

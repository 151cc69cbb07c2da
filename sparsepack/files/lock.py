"""One process at a time works on an output: a lock on a file beside it, which ends with the process that has it.

The file `.NAME.lock` says who holds the lock, and since when. It is removed when the work is done. The one of a process
that was killed is nobody's: the next process takes it over.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError
from sparsepack.files.side_files import open_file, open_regular
from sparsepack.progress import say

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system says that has no locks."""
_LONGEST = 200
"""What a lock says of its holder has fewer bytes."""

if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30
    """The byte that is locked, beyond those that say who works: Windows lets nobody read what is locked."""

    def _lock(file: int, wait: bool) -> None:
        os.lseek(file, _FAR, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        os.lseek(file, 0, os.SEEK_SET)
else:
    import fcntl

    def _lock(file: int, wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Within the context no other process, and no other thread of this one, works on the output `path`.

    wait -- until nobody does; else raise `OutputError`, which says who does and since when

    Raises `OutputError` where the lock's file cannot be written. Where the file system has no locks, a note says so.
    """
    lock = _lock_path(path)
    try:
        file = _opened(lock, wait)
    except OSError as error:
        if error.errno in _HELD:
            raise OutputError(
                f"{path}: {_holder(lock)} is working on it; wait until that has ended, or give another name"
            ) from error
        raise OutputError(f"{path}: cannot be written ({error.strerror}: {lock.name} beside it)") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)  # while it is still held, so that it is nobody else's
        os.close(file)
        with suppress(OSError):
            if sys.platform == "win32":  # where an open file cannot be removed
                lock.unlink(missing_ok=True)


def remove_lock(path: Path) -> None:
    """Remove the lock of the output `path` that a killed process left there, if nobody holds it."""
    if os.path.lexists(_lock_path(path)):
        with suppress(OutputError), locked(path):
            pass


def _lock_path(path: Path) -> Path:
    return path.absolute().parent / f".{path.name}.lock"


def _opened(lock: Path, wait: bool) -> int:
    """The descriptor of the file, locked, with who works written there. Raises OSError, and `OutputError` as
    `open_file`."""
    while True:
        file = open_file(lock)
        try:
            try:
                _lock(file, wait)
            except OSError as error:
                if error.errno not in _UNKNOWN:
                    raise
                say(f"note: {lock.parent} is on a file system without locks; run one command for an output at a time")
            if _stands_there(file, lock):  # and was not removed by who held it before
                os.ftruncate(file, 0)
                os.write(file, json.dumps({"process": os.getpid(), "since": time.time()}).encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _stands_there(file: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), lock.lstat())
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    """The process that holds a lock and its begin, as far as the file says so, which may just have been made."""
    try:
        with open_regular(lock) as file:
            said: Any = json.loads(file.read(_LONGEST))
        process, since = int(said["process"]), time.localtime(float(said["since"]))
        return f"process {process}, begun {time.strftime('%Y-%m-%d %H:%M:%S', since)},"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"

"""The files that stand beside an output while it is made: temporary ones, locks, folders of a run's state.

Their names can be guessed, and a folder from a stranger may hold anything under them. So none of these functions
follows a link: it is refused in one line, and so is what is no ordinary file, or no folder. Numbers that names hold are
those of processes only where a process can have them.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparsepack.errors import OutputError

# Windows has none of these; a link to be refused is found by `lstat` there.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_MOST_PROCESSES = 1 << 31  # a process number is a 32-bit int with a sign


def create_file(path: Path) -> None:
    """Make an empty file where nothing is, not even a link. Raises `OutputError` where something is, else OSError."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY, 0o666))
    except FileExistsError as error:
        raise OutputError(f"{path}: stands where a temporary file is to be made; remove it and run again") from error


def open_file(path: Path) -> int:
    """Return the descriptor of a file, made where nothing is, for reading and writing; nothing is truncated.

    Raises `OutputError` for a link, for a file that has another name, too, and for what is no file; else OSError.
    """
    check_no_link(path)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _BINARY, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link made just now, a folder, a socket
            raise
        raise _foreign(path, "no file of ours") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise _foreign(path, "no file of ours" if status.st_nlink <= 1 else "a file that has another name, too")
    return file


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file for reading. Raises OSError for a link and for what is no file, as where nothing is."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    with os.fdopen(os.open(path, os.O_RDONLY | _NO_FOLLOW | _BINARY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        yield file


def make_folder(path: Path) -> None:
    """Make a folder where there is none. Raises `OutputError` for a link, and where the disk refuses it."""
    check_no_link(path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be made ({error.strerror})") from error


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a path is an ordinary file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def folders_in(path: Path) -> list[Path]:
    """The folders in a folder, links to folders left out; none where `path` is none itself."""
    return [entry for entry in path.iterdir() if is_folder(entry)] if is_folder(path) else []


def check_no_link(path: Path) -> None:
    """Raise `OutputError` where a link has the name of what we make beside an output."""
    if path.is_symlink():
        raise _foreign(path, "a link, which is not followed")


def process_number(text: str) -> int | None:
    """The number of a process that a file's name ends with; None where no process can have it."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        return None
    number = int(text)
    return number if 0 < number < _MOST_PROCESSES else None


def is_running(process: int) -> bool:
    """Whether a process of this machine has that number."""
    if os.name == "nt":  # where a signal of 0 is none
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _foreign(path: Path, what: str) -> OutputError:
    return OutputError(f"{path}: {what}; remove it, or name an output elsewhere")

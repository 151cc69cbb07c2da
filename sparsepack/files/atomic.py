"""Outputs that appear whole or not at all: written under a temporary name beside the target, then renamed.

A folder that replaces another one changes places with it in one step. Where the file system cannot do that, the old one
steps aside first, into a folder `.NAME.replaced` with a mark of ours; a run that is killed right then leaves it there,
and the next one restores it. Another folder of that name is nobody's business: it stays as it is.

Exchange what two names stand for, in one step: whoever looks sees the one or the other under each, never none.
"""

import ctypes
import errno
import glob
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError
from sparsepack.files.side_files import create_file, is_folder, is_running, process_number

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux
_RENAME_SWAP = 2  # macOS
# What a kernel or a file system says that does not know how (EPERM: what a container's filter says for it).
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders of one file system.

    False, and nothing is changed, where the system or the file system cannot do that. Raises OSError for what the disk
    refuses.
    """
    function = _function()
    if function is None:
        return False
    if function(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one))


@cache
def _function() -> Any:
    """(one, other) -> 0, or -1 with errno set; None where the C library has nothing of the kind."""
    if sys.platform == "win32":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    path, flags = ctypes.c_char_p, ctypes.c_uint
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        swap = library.renamex_np
        swap.argtypes = (path, path, flags)
        return lambda one, other: swap(one, other, _RENAME_SWAP)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        rename = library.renameat2
        rename.argtypes = (ctypes.c_int, path, ctypes.c_int, path, flags)
        return lambda one, other: rename(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE)
    return None


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The last three: another run has just put a folder there; an overlay does not move those of its lower layers.
_REFUSED = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTEMPTY, errno.EEXIST, errno.EXDEV)
_FAILED = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)


_OF_INPUTS = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Files of an input folder with these endings are read; others there, such as README.md, may be replaced."""


def check_inputs(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs, by any name or link, holds one, or replaces a file of one: even
    `overwrite` would lose what the output is made from."""
    for source in inputs:
        try:
            same = source.exists() and path.exists() and path.samefile(source)
            inside = path.is_dir() and source.exists() and source.resolve().is_relative_to(path.resolve())
            replaced = path.is_file() and source.is_dir() and path.suffix in _OF_INPUTS
            replaced = replaced and path.resolve().parent in (source.resolve(), source)
        except (OSError, ValueError):  # no path at all
            continue
        if same or inside or replaced:
            what = "it is" if same else "it holds" if inside else "a file of"
            raise OutputError(f"{path}: {what} the input {source}, which would be lost; give another name")


def check_output(path: Path, overwrite: bool, folder: bool = False, marker: str | None = None) -> None:
    """Refuse an output that exists (unless `overwrite`), or whose folder does not or cannot be written, before any work
    is done for it.

    Even `overwrite` replaces only a file by a file, and a folder by a folder: an empty one, or one that holds a file
    named `marker` where that is given. A folder that a killed run left aside is put back first.
    """
    try:
        _temporary(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # its name is longer than the output's own
        raise OutputError(f"{path}: cannot be written ({error.strerror}); give another name") from error
    if folder:
        restore_folder(path)
    if path.is_symlink() and not path.exists():
        raise OutputError(f"{path}: a link to what is not there; remove it or give another name")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OutputError(f"{path}: a device or the like, which would be replaced; expected the name of a file")
    if path.exists() and path.is_dir() != folder:
        is_a, expected = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise OutputError(f"{path}: a {is_a}; expected the name of a {expected}")
    check_free(path, overwrite)
    if marker and path.exists() and any(path.iterdir()) and not (path / marker).is_file():
        raise OutputError(f"{path}: a folder without {marker}; it is not replaced, give another name")
    parent = path.absolute().parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: cannot be written, since the folder {parent} cannot; name another")
    if not path.exists():
        try:  # some folders, those of /proc for one, say that they can be written
            tempfile.TemporaryFile(dir=parent).close()
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror}); name another folder") from error


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse an output that exists (unless `overwrite`), or whose folder does not: in no time."""
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; give another name or --overwrite")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"{path}: the folder {parent} does not exist; create it first")


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of an empty temporary file; on success it is synced and renamed to `path`, on any failure removed.

    Raises `OutputError` where the output exists or the disk refuses it (full, failing, read-only, no permission).
    """
    check_output(path, overwrite)
    temporary = _temporary(path)
    remove(temporary)  # a killed process may have had this one's number
    try:
        with _disk_errors(path):
            create_file(temporary)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
    finally:
        remove(temporary)


@contextmanager
def atomic_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; on success it is renamed to `path` (replacing it if `overwrite`), else removed.

    Raises `OutputError` as `atomic_file` does.
    """
    check_output(path, overwrite, folder=True)
    target = path.resolve()  # a link to a folder stays a link
    temporary = _temporary(target)
    remove(temporary)
    try:
        with _disk_errors(path):
            temporary.mkdir()
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            _put(temporary, target)
    finally:
        remove(temporary)  # where it was exchanged, what it replaced


def restore_folder(path: Path) -> None:
    """Put back the folder `path` if a run was killed when it had stepped aside for another; else clear what is left of
    such a one."""
    target = Path(os.path.realpath(path))  # which takes a link to itself, as `resolve` does not
    aside = _aside(target)
    with suppress(OSError):
        mark = (aside / _MARK).lstat()
        ours = not hasattr(os, "geteuid") or mark.st_uid == os.geteuid()  # Windows has no such numbers
        if not is_folder(aside) or not stat.S_ISREG(mark.st_mode) or not ours:
            return
        if not target.exists() and is_folder(aside / _REPLACED):
            (aside / _REPLACED).rename(target)
        remove(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and the disk lets go of it; a disk that fails is asked twice."""
    for _ in range(2):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not os.path.lexists(path):
            break


def remove_leftovers(path: Path) -> None:
    """Remove what other runs left beside the output `path`: killed ones, and those that the disk kept from it."""
    start = _start(path)
    for left in path.absolute().parent.glob(f"{glob.escape(start)}*"):
        process = process_number(left.name.removeprefix(start))
        if process is not None and not is_running(process):
            remove(left)


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
    remove_leftovers(path)
    return path.absolute().parent / f"{_start(path)}{os.getpid()}"


def _start(path: Path) -> str:
    return f".{path.name}.partial-{_machine()}-"


def _machine() -> str:
    """The name of the machine on which process numbers are unique: containers may share a machine's name, but not its
    processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        namespace = ""
    return re.sub(r"\W+", "-", f"{platform.node()[:32]}-{namespace}").strip("-")


def _sync(file: Path) -> None:
    """Have the disk write it down: a name that survives a power failure must not stand for less."""
    # Windows syncs only what may be written; elsewhere a file may be for reading only.
    with file.open("r+b" if sys.platform == "win32" else "rb") as opened:
        os.fsync(opened.fileno())


def _put(folder: Path, target: Path) -> None:
    """Give `folder` the name `target`. What had it before, if anything, stands under the name of `folder` then, or is
    removed; if this fails, it keeps its name."""
    if not target.exists():
        folder.rename(target)
    elif not exchange(folder, target):
        aside = _aside(target)
        with suppress(OSError):
            aside.rmdir()  # of a run that was killed before it left its mark
        if os.path.lexists(aside):
            raise OutputError(f"{aside}: in the way of what {target.name} holds now; move it elsewhere")
        aside.mkdir()
        create_file(aside / _MARK)
        try:
            target.rename(aside / _REPLACED)
            folder.rename(target)
        except BaseException:
            restore_folder(target)
            raise
        remove(aside)


_MARK, _REPLACED = "sparsepack-replaces", "replaced"
"""Within a folder that stands aside: a file that says who put it there, and what was replaced."""


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutputError(f"{path}: the disk is full ({error.strerror}); free some space and run again") from error
        if error.errno in _REFUSED:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        if error.errno in _FAILED:
            raise OutputError(f"{path}: the disk fails ({error.strerror}); look after it and run again") from error
        raise

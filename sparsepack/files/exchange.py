"""Exchange what two names stand for, in one step: whoever looks sees the one or the other under each, never none."""

import ctypes
import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

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

"""The place where sparsepack keeps what it found out about a machine, or made for it."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder `sparsepack` below $XDG_CACHE_HOME, or ~/.cache.

    Where the user has neither HOME nor an entry it lies below a device: nothing can be read or written there.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "sparsepack"
    try:
        return Path.home() / ".cache" / "sparsepack"
    except RuntimeError:
        return Path(os.devnull) / "sparsepack"

"""Memory that a large request took, given back to the system."""

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`; None in other C libraries."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of no name
        return None


def give_back_memory() -> None:
    """Let the system have what was freed. glibc keeps it for each thread otherwise: hundreds of MB after one long
    prompt. Takes milliseconds, in which other threads run."""
    if (trim := _trim()) is not None:
        trim(0)

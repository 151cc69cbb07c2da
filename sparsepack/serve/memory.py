"""What a server does with its memory: what a large request took is given back to the system, and what is there for
good is not looked at again and again."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def here_for_good() -> Iterator[None]:
    """Let the garbage collector leave alone what is there already: the model, and what was imported. A full collection
    would look at all of it every now and then, half a million objects; that takes a tenth of a second, in which no
    other thread runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

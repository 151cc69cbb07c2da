"""Kernels compiled for the processor, kept between runs by all that they depend on."""

import hashlib
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "emulated"


@cache
def _headers(folder: Path) -> str:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
    return "\0".join(f"{file.name}\0{file.read_text()}" for file in files)


def kept(text: str, flags: Iterable[object], headers: Iterable[Path], compile: Callable[[Path, Path], None]) -> Path:
    """The library that `compile(source, library)` makes of a C++ text, from the last time that it was asked for.

    flags   -- the compiler, its version and its flags
    headers -- folders that the text includes files of
    """
    parts = (text, *map(str, flags), *map(_headers, headers))
    stem = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = FOLDER / f"{stem}.so"
    if not library.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        source, made = FOLDER / f"{stem}-{os.getpid()}.cpp", FOLDER / f"{stem}-{os.getpid()}.so"
        source.write_text(text)
        try:
            compile(source, made)
            made.replace(library)
        finally:
            source.unlink()
    return library

"""The characters of a text file, in pieces: no file is in memory as a whole."""

import codecs
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from sparsepack.errors import TextError

OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_BYTES = 1 << 20


class TextFile:
    """A file of UTF-8 text, plain or compressed. Iterating over it reads it, each time anew, about 1 MiB at a time.

    Ends of lines become `\\n`, a byte order mark is left out. Raises `TextError` where the file cannot be read, is
    damaged or not UTF-8, and where it is no longer the file that was read first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            with OPENERS.get(self.path.suffix, open)(self.path, "rb") as file:  # type: ignore[operator]
                self._check_unchanged(os.fstat(file.fileno()))
                yield from _decoded(file)
        except UnicodeDecodeError as error:
            raise TextError(f"{self.path}: not UTF-8 text (byte {error.start}); convert it first") from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            if isinstance(error, OSError) and error.strerror:
                raise TextError(f"{self.path}: cannot be read ({error.strerror})") from error
            raise TextError(f"{self.path}: cannot be read ({error}); is it whole?") from error

    def lines(self) -> Iterator[str]:
        """The lines without their ends; of the last one what there is."""
        rest: list[str] = []
        for piece in self:
            first, *others = piece.split("\n")
            rest.append(first)
            for line in others:
                yield "".join(rest)
                rest = [line]
        yield "".join(rest)

    @property
    def blank(self) -> bool:
        """Whether there is nothing but white space in it."""
        return all(not piece.strip() for piece in self)

    def _check_unchanged(self, status: os.stat_result) -> None:
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._first not in (None, found):
            raise TextError(f"{self.path}: it changed while it was in use; run again")
        self._first = found


def _decoded(file: io.BufferedIOBase) -> Iterator[str]:
    """UnicodeDecodeError's `start` is the place in the whole file."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    data = file.read(_BYTES)
    before = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    data = data[before:]
    while True:
        waiting = len(utf8.getstate()[0])  # bytes of a character whose end is still to come
        try:
            piece = lines.decode(data, final=not data)
        except UnicodeDecodeError as error:
            error.start += before - waiting
            raise
        if piece:
            yield piece
        if not data:
            return
        before += len(data)
        data = file.read(_BYTES)

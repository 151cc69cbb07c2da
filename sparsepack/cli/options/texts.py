"""Texts that options and arguments name: files, or standard input."""

import sys
from pathlib import Path

from sparsepack.errors import UserError


def text_of(path: Path) -> str:
    """A file's text without the end of its last line; `-` is standard input."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a text file") from error
    return utf8(data, path).removesuffix("\n").removesuffix("\r")


def utf8(data: bytes, where: object) -> str:
    """Bytes as text, without the mark that some editors begin a file with. Raises `UserError` for what is no UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not text (byte {error.start} is not UTF-8); expected text in UTF-8") from error

"""Standard output and error of a command: whatever they are connected to, printing never ends in a traceback."""

import errno
import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from typing import Any, TextIO

from sparsepack.terminal import is_terminal, printable, tell
from sparsepack.uncaught import show_uncaught

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EPIPE, errno.EBADF, errno.ECONNRESET)


def prepare() -> None:
    """Give each standard stream something to be, and let it replace what its encoding cannot print.

    A stream that was closed (`>&-`) would leave its number to the next file that is opened, which libraries then print
    into. Output gets a descriptor that cannot be written, so that printing fails as it does in other programs; input
    is empty.
    """
    for number, how in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, how)  # the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    logging.setLogRecordFactory(_Record)
    warnings.showwarning = _show_warning
    show_uncaught()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning, which may quote a file and has the name of one, so that it commands no terminal."""
    with suppress(OSError):  # of a standard error that is closed
        tell(warnings.formatwarning(message, category, filename, lineno, line), file or sys.stderr, end="")


class _Record(logging.LogRecord):
    """What a library has to say, and the traceback that it says it with: both may quote a file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            self.exc_text = printable(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return printable(super().getMessage())


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for standard output, with escapes where its encoding cannot print a character or a terminal would obey
    one."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    obeyed = is_terminal(sys.stdout) and printable(text) != text
    return json.dumps(value, indent=indent) if obeyed else text


def failure() -> str | None:
    """Why no line's end can be printed: "full", "closed", or None where it can be.

    A stream that fails drops what it holds and all that comes, so that leaving the program does not fail too.
    """
    found = None
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is sys.stdout:
                stream.write("\n")
            stream.flush()
        except OSError as error:
            found = "full" if error.errno in _FULL else "closed"
            _silence(stream)
    return found


def may_be_output(error: OSError) -> bool:
    """Whether an error is of the kind that printing raises."""
    return error.errno in (*_FULL, *_CLOSED)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

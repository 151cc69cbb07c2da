"""Text for people, and errors that nobody caught: whatever a file or a model says, it commands no terminal."""

import re
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import asyncio  # every command loads this module, and few an event loop


_COMMANDS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
"""Control characters but tab and the ends of lines, and what makes letters appear in another order than they have
(bidirectional embeddings, overrides and isolates)."""


def printable(text: str) -> str:
    """The text with a question mark for every character that would command a terminal or reorder what it shows."""
    return _COMMANDS.sub("?", text)


def is_terminal(stream: TextIO) -> bool:
    """Whether people read a stream as it is written."""
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def tell(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write a text to a stream (None: standard output) at once: `printable` on a terminal, elsewhere as it is."""
    stream = sys.stdout if stream is None else stream
    stream.write((printable(text) if is_terminal(stream) else text) + end)
    stream.flush()


def show_uncaught() -> None:
    """From now on, show what nobody caught in a form that commands no terminal."""
    sys.excepthook, sys.unraisablehook, threading.excepthook = _of_the_program, _of_a_destructor, _of_a_thread


def event_loop_exception_handler(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
    """Show what an event loop has nobody to tell of; an event loop's exception handler."""
    _show(context.get("message") or "an event loop", context.get("exception"))


def _of_the_program(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    _tell("".join(traceback.format_exception(kind, error, where)).rstrip("\n"))


def _of_a_thread(uncaught: threading.ExceptHookArgs) -> None:
    if uncaught.exc_type is not SystemExit:
        name = "a thread" if uncaught.thread is None else f"thread {uncaught.thread.name}"
        _show(name, uncaught.exc_value or uncaught.exc_type(), uncaught.exc_traceback)


def _of_a_destructor(uncaught: "sys.UnraisableHookArgs") -> None:
    where = f"{uncaught.err_msg or 'ignored in'} {uncaught.object!r}"
    _show(where, uncaught.exc_value or uncaught.exc_type(), uncaught.exc_traceback)


def _show(where: str, error: BaseException | None, trace: TracebackType | None = None) -> None:
    """Say in one line what went wrong, where, and which line of which file raised it."""
    said = where
    if error is not None:
        trace = trace or error.__traceback__
        if sys.flags.dev_mode:
            _of_the_program(type(error), error, trace)
        raised = [f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in traceback.extract_tb(trace)[-1:]]
        said = f"{where}: {''.join(traceback.format_exception_only(error)).strip()}{''.join(raised)}"
    _tell(f"sparsepack: {printable(' '.join(said.split()))}")


def _tell(text: str) -> None:
    if sys.stderr is not None:  # it is, where the interpreter ends
        with suppress(OSError, ValueError):  # of a standard error that is closed
            tell(text, sys.stderr)

"""The one place where text for people is written: whatever a file or a model says, it commands no terminal."""

import re
import sys
from typing import TextIO

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

"""Answers in parts: the text, the calls of tools and the reasoning in what a model writes."""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsepack.runtime.generation.continuation import StopText
from sparsepack.serve.tool_formats import Functions, ToolFormat


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls, with its arguments in JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True)
class ParsedText:
    """Parts of an answer, in this order.

    reasoning -- what the model wrote before its answer, for itself
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def __add__(self, later: "ParsedText") -> "ParsedText":
        return ParsedText(self.text + later.text, self.calls + later.calls, self.reasoning + later.reasoning)


class AnswerParser(Protocol):
    """Tells the text of an answer from the calls in it."""

    def push(self, piece: str) -> ParsedText:
        """Add text. Returns what certainly is no part of a call, and the calls that are complete."""

    def finish(self) -> ParsedText:
        """The rest of the text and of the calls, when no more text comes."""


class PlainTextParser:
    """Takes all for text."""

    def push(self, piece: str) -> ParsedText:
        return ParsedText(piece)

    def finish(self) -> ParsedText:
        return ParsedText()


class ToolCallParser:
    """Reads calls of one of the forms. From what looks like a call and is none, or calls a function that was not given,
    all is text.

    most -- calls that are returned; those after them are dropped. None: all are returned
    """

    def __init__(self, format: ToolFormat, functions: Functions, most: int | None = None) -> None:
        self._format, self._functions, self._left = format, functions, most
        self._starts = StopText(format.starts)
        self._buffer = ""  # not yet returned, neither as text nor as a call
        self._called = self._is_text = False

    def push(self, piece: str) -> ParsedText:
        self._buffer += piece
        text, calls = self._release(self._plain_prefix(piece)), list[ToolCall]()
        if any(end in self._buffer[-len(piece) - len(end) + 1 :] for end in self._format.ends):
            calls = self._complete_calls(final=False)  # else none became complete
        return ParsedText(text + (self._release(len(self._buffer)) if self._is_text else ""), tuple(calls))

    def finish(self) -> ParsedText:
        calls = self._complete_calls(final=True)
        rest = self._release(len(self._buffer))
        behind = rest.strip().removeprefix(self._format.end.strip())
        return ParsedText("" if self._called and not behind else rest, tuple(calls))

    def _plain_prefix(self, piece: str) -> int:
        """How many characters of what is held are no part of a call, whatever comes after them."""
        if self._format.starts:
            return len(self._starts.push(piece))
        self._is_text |= self._buffer.lstrip()[:1] not in ("", "{")
        return 0

    def _release(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _complete_calls(self, final: bool) -> list[ToolCall]:
        """The calls with which what is held begins; they are held no more."""
        calls: list[ToolCall] = []
        while not self._is_text and (found := self._format.read(self._buffer, self._functions, final)) is not None:
            values, length = found
            each = [self._call(name, arguments) for name, arguments in values]
            if not each or None in each:
                self._is_text = True
                break
            for call in each:
                if call is not None and self._left != 0:
                    calls.append(call)
                    self._left = None if self._left is None else self._left - 1
            self._release(length)
            self._called = True
        return calls

    def _call(self, name: Any, arguments: Any) -> ToolCall | None:
        if not isinstance(name, str) or name not in self._functions or not isinstance(arguments, dict):
            return None
        # In ASCII: half of a character of UTF-16, which JSON can spell out, has no UTF-8.
        return ToolCall(name, json.dumps(arguments))

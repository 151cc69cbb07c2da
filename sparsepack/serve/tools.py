"""Calls of tools, as models write them in their answers."""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsepack.runtime.generation.continuation import StopText


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: a JSON object with the function's name and its arguments, between marks.

    arguments -- the key of the arguments
    begins    -- texts before the object; ends -- texts after it; none: the answer is the object
    """

    arguments: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


HERMES = ToolFormat("arguments", ("<tool_call>", "\n"), ("\n", "</tool_call>"))
"""Hermes and Qwen; there may be several calls, and text before them."""

LLAMA = ToolFormat("parameters")
"""Llama 3: the answer is one object or several, with semicolons between them."""


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None: one that is not known here."""
    if HERMES.begins[0] in template:
        return HERMES
    return LLAMA if re.search(r'"parameters"\s*:', template) and '"name"' in template else None


def takes_tools(template: str) -> bool:
    """Whether a chat template looks at tools."""
    return re.search(r"\btools\b", template) is not None


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
    """Reads calls of one of the formats. From what looks like a call and is none, or calls a function that was not
    given, all is text.

    names -- of the functions
    most  -- calls that are told; those after them are dropped. None: all are told
    """

    def __init__(self, format: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        self._names, self._left = names, most
        self._begins, self._starts = bool(format.begins), StopText(format.begins[:1])
        self._mark = "".join(format.ends).strip() or ";"
        begin, mark = re.escape("".join(format.begins).strip()), re.escape(self._mark)
        self._begin, self._end = re.compile(rf"\s*{begin}\s*"), re.compile(rf"\s*{mark}")
        self._last = re.compile(rf"\s*(?:{mark}|\Z)")
        self._buffer = ""  # told neither as text nor as a call
        self._called = self._is_text = False

    def push(self, piece: str) -> ParsedText:
        self._buffer += piece
        text, calls = self._release(self._plain_prefix(piece)), list[ToolCall]()
        if self._mark in self._buffer[-len(piece) - len(self._mark) + 1 :]:  # else no call became complete
            calls = self._complete_calls(self._end)
        return ParsedText(text + (self._release(len(self._buffer)) if self._is_text else ""), tuple(calls))

    def finish(self) -> ParsedText:
        calls = self._complete_calls(self._last)
        rest = self._release(len(self._buffer))
        return ParsedText("" if self._called and not rest.strip() else rest, tuple(calls))

    def _plain_prefix(self, piece: str) -> int:
        """How many characters of what is held are no part of a call, whatever comes after them."""
        if self._begins:
            return len(self._starts.push(piece))
        self._is_text |= self._buffer.lstrip()[:1] not in ("", "{")
        return 0

    def _release(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _complete_calls(self, end: re.Pattern[str]) -> list[ToolCall]:
        """The calls with which what is held begins, each up to `end`; they are held no more."""
        calls = []
        while not self._is_text and (found := self._object(end)) is not None:
            value, length = found
            if (call := self._call(value)) is None:
                self._is_text = True
            else:
                if self._left != 0:
                    calls.append(call)
                    self._left = None if self._left is None else self._left - 1
                self._release(length)
                self._called = True
        return calls

    def _object(self, end: re.Pattern[str]) -> tuple[Any, int] | None:
        """What stands between two marks at the beginning of what is held, and how many characters that takes."""
        if (begun := self._begin.match(self._buffer)) is None:
            return None
        try:
            value, at = JSON_DECODER.raw_decode(self._buffer, begun.end())
        except (ValueError, RecursionError):
            return None
        ended = end.match(self._buffer, at)
        return None if ended is None else (value, ended.end())

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        # In ASCII: half of a character of UTF-16, which JSON can spell out, has no UTF-8.
        return ToolCall(name, json.dumps(arguments)) if isinstance(arguments, dict) else None


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


JSON_DECODER = json.JSONDecoder(parse_constant=_no_json)
"""Reads JSON, without Python's additions NaN and Infinity."""

"""Calls of tools, as models write them in their answers."""

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsepack.runtime.stopping import StopText


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


class AnswerReader(Protocol):
    """Tells the text of an answer from the calls in it."""

    def push(self, piece: str) -> str:
        """Add text. Returns what certainly is no part of a call."""

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text, and the calls, when no more text comes."""


class TextReader:
    """Takes all for text."""

    def push(self, piece: str) -> str:
        return piece

    def finish(self) -> tuple[str, list[ToolCall]]:
        return "", []


class CallReader:
    """Reads calls of one of the formats; what is none, or calls a function that was not given, is text.

    names -- of the functions
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self._format, self._names = format, names
        self._marks = StopText(format.begins[:1])
        self._text, self._told = "", 0

    def push(self, piece: str) -> str:
        self._text += piece
        if self._format.begins:
            return self._tell(self._marks.push(piece))
        return "" if self._text.lstrip()[:1] in ("", "{") else self._tell(self._text[self._told :])

    def finish(self) -> tuple[str, list[ToolCall]]:
        rest = self._text[self._told :]
        calls = list(self._calls(rest))
        if not calls or None in calls:
            return rest, []
        return "", [call for call in calls if call is not None]

    def _tell(self, text: str) -> str:
        self._told += len(text)
        return text

    def _calls(self, rest: str) -> Iterator[ToolCall | None]:
        """The calls in the rest of an answer; None for what is none."""
        decoder, at = json.JSONDecoder(), 0
        between = re.compile("|".join([r"[\s;]+", *(re.escape(mark.strip()) for mark in self._marks_of_calls())]))
        while at < len(rest):
            if found := between.match(rest, at):
                at = found.end()
                continue
            try:
                value, at = decoder.raw_decode(rest, at)
            except (ValueError, RecursionError):
                yield None
                return
            yield self._call(value)

    def _marks_of_calls(self) -> Iterator[str]:
        return (mark for mark in (*self._format.begins, *self._format.ends) if mark.strip())

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return (
            ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
        )

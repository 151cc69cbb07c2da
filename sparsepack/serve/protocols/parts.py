"""Conversations and answers that consist of parts: what Anthropic's messages and OpenAI's Responses have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, model_validator

from sparsepack.serve import messages
from sparsepack.serve.answer import Answer, AnswerWriter, Choice, json_bytes
from sparsepack.serve.liberal import Json
from sparsepack.serve.tools import ToolCall

IGNORED = frozenset(
    (
        *("cache_control", "caller", "citations", "data", "is_error", "signature", "budget_tokens", "display"),
        *("annotations", "created_by", "encrypted_content", "id", "logprobs", "phase", "status"),
        *("type", "description", "strict", "summary", "generate_summary", "verbosity", "defer_loading"),
    )
)
"""Fields of Anthropic's and OpenAI's parts that say nothing about the text, where a part does not declare them."""


class Part(messages.Part):
    """A part of a request, without the fields in `IGNORED` and unknown ones that are null."""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        known = cls.model_fields
        return {name: value for name, value in part.items() if name in known or not (value is None or name in IGNORED)}


def by_type(types: Sequence[str], remedy: str = "", default: str | None = None) -> Discriminator:
    """Return what chooses a part's class by its `type`, which is `default` where there is none."""

    def type_of(part: Any) -> str | None:
        kind = (part.get("type") or default) if isinstance(part, dict) else None
        return kind if isinstance(kind, str) else None

    context: Json = {"name": "type", "reason": f"expected one of {', '.join(types)}{remedy}"}
    message = "{name}: {reason}"
    return Discriminator(type_of, "unsupported", custom_error_message=message, custom_error_context=context)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


AsParts = BeforeValidator(_as_parts)
"""A text stands for a list of one part."""


class TextPart(Part):
    """Text, by any of the names that the protocols have for it."""

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: str


TextParts = Annotated[list[TextPart], AsParts]


def joined(parts: Sequence[TextPart] | None) -> str:
    """Return the text of parts, each on a line of its own."""
    return "\n".join(part.text for part in parts or ())


def append_message(messages: list[Json], message: Json) -> None:
    """Add a message to a conversation of `ChatRequest`. One of the same role as the last one continues it, since chat
    templates expect roles that alternate; a call's result stays by itself."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    for name in ("reasoning_content", "content"):
        if texts := [text for one in (last, message) if (text := one.get(name))]:
            last[name] = "\n".join(texts)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


@dataclass
class AnswerPart:
    """A part of an answer: reasoning, text, or a call, whose pieces are those of its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call: ToolCall | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return what there is of it."""
        return "".join(self.pieces)


class PartsWriter(AnswerWriter):
    """Writes an answer of one sequence as parts, of which each is opened, continued and closed before the next.

    parts -- so far
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.parts: list[AnswerPart] = []
        self._open = False

    @abstractmethod
    def opening(self, part: AnswerPart) -> bytes:
        """Return what a stream has where a part begins."""

    @abstractmethod
    def piece(self, part: AnswerPart, text: str) -> bytes:
        """Return what a stream has for a piece of a part."""

    @abstractmethod
    def closing(self, part: AnswerPart) -> bytes:
        """Return what a stream has where a part ends."""

    @abstractmethod
    def body(self, choice: Choice) -> Json:
        """Return the whole answer, with `parts`."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        self.delta(choices[0])
        return json_bytes(self.body(choices[0]))

    def delta(self, choice: Choice) -> bytes:
        new = choice.take()
        events = self._add("reasoning", new.reasoning) if new.reasoning else b""
        events += self._add("text", new.text) if new.text else b""
        for call in new.calls:
            events += self._add("call", call.arguments, call)
        if choice.end is not None:
            events += b"" if self.parts else self._add("text", "")  # clients expect a part
            events += self._close()
        return events

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str, call: ToolCall | None = None) -> bytes:
        events = b""
        if not self._open or self.parts[-1].kind != kind or call is not None:
            events = self._close()
            self.parts.append(AnswerPart(kind, len(self.parts), call))
            self._open = True
            events += self.opening(self.parts[-1])
        self.parts[-1].pieces.append(text)
        return events + (self.piece(self.parts[-1], text) if text else b"")

    def _close(self) -> bytes:
        was_open, self._open = self._open, False
        return self.closing(self.parts[-1]) if was_open else b""

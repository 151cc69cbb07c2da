"""What reasoning models write before their answers: the marks around it, and what separates it from the answer."""

import re
from dataclasses import dataclass

from sparsepack.serve.tools import AnswerParser, ParsedText


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    begin, end -- around it; a template may write `begin` itself, at the end of the prompt
    between    -- from the reasoning to the answer
    opening    -- before the text of an answer, but not before calls; closing -- behind it
    others     -- further marks that belong to no text
    """

    begin: str
    end: str
    between: str = ""
    opening: str = ""
    closing: str = ""
    others: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        each = (self.begin, self.end, self.between, self.opening, self.closing, *self.others)
        return tuple(dict.fromkeys(mark for mark in each if mark))


THINK = ReasoningFormat("<think>", "</think>")
"""Qwen 3, DeepSeek R1, GLM 4.5, SmolLM3, Nemotron, LFM2.5 and most others."""

FORMATS = (
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        between="<|start|>assistant",
        opening="<|channel|>final<|message|>",
        others=("<|channel|>commentary<|message|>",),
    ),  # gpt-oss
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", opening="<|START_RESPONSE|>", closing="<|END_RESPONSE|>"
    ),  # Cohere
    THINK,
)
"""The first one whose first mark a template has, or whose last mark, is its form."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The form of reasoning that a chat template has; None: none that is known here."""
    return next((each for each in FORMATS if each.begin in template or (each.end in template and each is THINK)), None)


@dataclass(frozen=True)
class Reasoning:
    """What of an answer may be reasoning.

    open -- the prompt ends within the reasoning; None: behind it or it is switched off, and none may come
    """

    format: ReasoningFormat
    open: bool | None

    @classmethod
    def of_prompt(cls, format: ReasoningFormat, prompt: str) -> "Reasoning":
        """What may come behind a prompt."""
        last = prompt.rstrip()
        return cls(format, None if last.endswith(format.end) else last.endswith(format.begin))


class ReasoningParser:
    """Tells reasoning from the answer, which another parser reads, and drops the marks around them.

    reasoning -- what may come
    answer    -- reads the rest
    """

    def __init__(self, reasoning: Reasoning, answer: AnswerParser) -> None:
        self._format, self._answer = reasoning.format, answer
        self._within = bool(reasoning.open)
        self._marked = False  # whether there was a mark
        self._reasoned = self._answered = False  # whether there is any of it but space
        self._space = ""  # at the end of the reasoning, or between it and the answer
        self._buffer = ""
        longest_first = sorted(self._format.marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)))

    def push(self, piece: str) -> ParsedText:
        self._buffer += piece
        parsed, at = ParsedText(), 0
        for found in self._marks.finditer(self._buffer):
            parsed += self._text(self._buffer[at : found.start()]) + self._mark(found[0])
            at = found.end()
        kept = next((n for n in range(at, len(self._buffer)) if self._begins_mark(self._buffer[n:])), len(self._buffer))
        parsed += self._text(self._buffer[at:kept])
        self._buffer = self._buffer[kept:]
        return parsed

    def finish(self) -> ParsedText:
        rest, self._buffer = self._buffer, ""
        return self._text(rest) + self._answer.finish()

    def _begins_mark(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._format.marks)

    def _mark(self, mark: str) -> ParsedText:
        self._marked = True
        if self._within:
            self._within = mark != self._format.end
        elif mark == self._format.begin and not self._answered:
            self._within, self._space = True, ""
        elif mark in (self._format.begin, self._format.end) and not self._format.between:
            self._marked = self._answered
            return self._text(mark)
        return ParsedText()

    def _text(self, text: str) -> ParsedText:
        """Text between marks; space around the reasoning belongs to nothing."""
        if self._within:
            text = self._space + text if self._reasoned else text.lstrip()
            kept = text.rstrip()
            self._space, self._reasoned = text[len(kept) :], self._reasoned or bool(kept)
            return ParsedText(reasoning=kept)
        if not self._answered:
            text, self._space = (text.lstrip(), "") if self._marked else (self._space + text, "")
            if not text.strip():
                self._space = text
                return ParsedText()
            self._answered = True
        return self._answer.push(text)

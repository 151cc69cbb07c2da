"""An answer while its sequences are generated, and how a protocol writes it."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparsepack.runtime.generation.sampling import TokenLogprob
from sparsepack.serve.liberal import Json
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import TextParameters
from sparsepack.serve.ticket import Finish, TextDelta, Timings
from sparsepack.serve.tools import AnswerParser, ParsedText, PlainTextParser


@dataclass(frozen=True)
class Answer:
    """What is known of an answer before any of it is generated.

    request       -- what it answers
    model         -- the model's name
    fingerprint   -- changes with the model and what runs it
    client        -- address of the client
    prompt_tokens -- in the prompts, BOS included
    bytes_of      -- the bytes of a token, by its id
    parser        -- makes the parser of each sequence
    id            -- random, hexadecimal; each protocol gives it a prefix of its own
    created       -- seconds since 1970
    """

    request: TextParameters
    model: str
    fingerprint: str
    client: str
    prompt_tokens: int
    bytes_of: Callable[[int], bytes]
    parser: Callable[[], AnswerParser] = PlainTextParser
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


class Choice:
    """One sequence of an answer, while it is generated.

    index  -- its place in the answer
    new    -- text, reasoning and calls since `take`
    tokens -- log-probabilities of tokens since `take_tokens`
    calls  -- how many calls there are, those taken included
    begun  -- whether anything has come
    end    -- how it ended; None until then
    timings -- as of what came last; None: not known
    reasoning_tokens -- up to the end of the reasoning
    error  -- why it could not be generated; None where nothing failed
    """

    def __init__(self, index: int, parser: AnswerParser) -> None:
        self.index, self._parser = index, parser
        self.new, self.tokens = ParsedText(), list[TokenLogprob]()
        self.calls = 0
        self.begun = False
        self.end: Finish | None = None
        self.timings: Timings | None = None
        self.reasoning_tokens = 0
        self.error: Exception | None = None

    def add(self, event: TextDelta | Finish) -> None:
        """Add a piece of the sequence, or its end."""
        self.begun, self.timings = True, event.timings
        self.tokens += event.logprobs
        if isinstance(event, TextDelta):
            parsed = self._parser.push(event.text)
        else:
            self.end = event
            parsed = self._parser.finish()
        self.calls += len(parsed.calls)
        if parsed.reasoning and event.timings is not None:
            self.reasoning_tokens = event.timings.tokens
        self.new += parsed

    def take(self) -> ParsedText:
        """Return what came since the last call."""
        taken, self.new = self.new, ParsedText()
        return taken

    def take_tokens(self) -> list[TokenLogprob]:
        """Return the log-probabilities that came since the last call."""
        taken, self.tokens = self.tokens, []
        return taken


@dataclass(frozen=True)
class Usage:
    """Tokens of an answer; `cached` of the prompt's were not computed again, `reasoning` of the completion's stand
    before the text."""

    prompt: int
    completion: int
    cached: int
    reasoning: int

    @classmethod
    def of(cls, answer: Answer, choices: Sequence[Choice]) -> "Usage":
        """Count the sequences that have ended."""
        ends = [choice.end for choice in choices if choice.end is not None]
        completion, n = sum(end.tokens for end in ends), answer.request.n or 1
        of_each_prompt = (choices[first : first + n] for first in range(0, len(choices), n))
        cached = sum(min((one.end.cached for one in some if one.end), default=0) for some in of_each_prompt)
        return cls(answer.prompt_tokens, completion, cached, sum(choice.reasoning_tokens for choice in choices))


class AnswerWriter(ABC):
    """Writes one answer in a protocol's form: `whole` in one piece, or `begin`, `delta`s and `end` in a stream.

    content_type -- of a stream
    keep_alive   -- what a stream sends that has had nothing to send for a while; clients skip it
    """

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = b": the text is on its way\n\n"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the whole answer, of sequences that have ended, as JSON in UTF-8."""

    @abstractmethod
    def begin(self, choices: Sequence[Choice]) -> bytes:
        """Return what a stream has before any text."""

    @abstractmethod
    def delta(self, choice: Choice) -> bytes:
        """Return what a stream has for what came of a sequence since the last call, its end included."""

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return what a stream has after all sequences have ended."""

    @abstractmethod
    def failure(self, refusal: Refusal) -> bytes:
        """Return what a stream has in place of the rest, where the answer failed."""


_LINE_ENDS = str.maketrans({"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"})
"""Ends of lines for clients that split a stream as Python's `str.splitlines` does, such as Ollama's."""


def json_bytes(body: Json | list[Json]) -> bytes:
    """Return a body in UTF-8, without spaces, in one line."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS).encode()


def server_sent(body: Json, event: str | None = None) -> bytes:
    """Return a body as a server-sent event, with a name where a protocol names events."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + json_bytes(body) + b"\n\n"

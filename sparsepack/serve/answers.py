"""The bodies of responses, whole and as server-sent events, with log-probabilities of their tokens."""

import codecs
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsepack.runtime.generation.sampling import TokenLogprob
from sparsepack.serve.ticket import Finish, TextDelta
from sparsepack.serve.tools import AnswerParser, PlainTextParser, ToolCall

Bytes = Callable[[int], bytes]
"""What a token stands for, by its id."""

LogprobsFormatter = Callable[[Sequence[TokenLogprob]], dict[str, Any]]
"""What a choice or a chunk says of the next tokens of one text."""


def completion_logprobs(bytes_of: Bytes) -> LogprobsFormatter:
    """Lists of the same length, one element for each token. `top_logprobs` has the token itself, too. A token's offset
    is the number of characters that are whole before it."""
    decoder, decoded = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def offset_of(token: TokenLogprob) -> int:
        nonlocal decoded
        before, decoded = decoded, decoded + len(decoder.decode(bytes_of(token.id)))
        return before

    def said(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [_text(bytes_of(token.id)) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_text(bytes_of(id)): logprob for id, logprob in ((token.id, token.logprob), *reversed(token.top))}
                for token in tokens
            ],
            "text_offset": [offset_of(token) for token in tokens],
        }

    return said


def chat_logprobs(bytes_of: Bytes) -> LogprobsFormatter:
    """A record for each token."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        found = bytes_of(id)
        return {"token": _text(found), "logprob": logprob, "bytes": list(found)}

    def said(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    return said


def _text(found: bytes) -> str:
    """Bytes as text; those of half a character show as U+FFFD."""
    return found.decode(errors="replace")


Json = dict[str, Any]


@dataclass(frozen=True)
class ResponseShape:
    """What differs between completions and chat completions.

    prefix  -- of the answer's id
    object  -- the answer's kind, in one piece
    chunk   -- its kind in pieces
    whole   -- the text and the calls in a choice
    opening -- in the choice of the first chunk; None: there is no such chunk
    piece   -- a piece of text in the choice of a chunk
    closing -- in the choice of the chunk that tells why the text ended
    """

    prefix: str
    object: str
    chunk: str
    whole: Callable[[str, list[Json]], Json]
    opening: Json | None
    piece: Callable[[str], Json]
    closing: Json


def _message(text: str, calls: list[Json]) -> Json:
    called = {"tool_calls": calls} if calls else {}
    return {"message": {"role": "assistant", "content": text or (None if calls else ""), "refusal": None, **called}}


COMPLETION = ResponseShape(
    prefix="cmpl",
    object="text_completion",
    chunk="text_completion",
    whole=lambda text, calls: {"text": text},
    opening=None,
    piece=lambda text: {"text": text},
    closing={"text": ""},
)
CHAT = ResponseShape(
    prefix="chatcmpl",
    object="chat.completion",
    chunk="chat.completion.chunk",
    whole=_message,
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
)


@dataclass(frozen=True)
class Answer:
    """One answer, of one text or several.

    model         -- the model's name
    fingerprint   -- changes with the model and what runs it
    prompt_tokens -- in the prompt, BOS included
    with_usage    -- whether the chunks have a usage, which is null in all but the last
    logprobs      -- makes what says how likely tokens were, for each text; None: nothing does
    parser        -- makes what tells text from calls, for each text
    """

    form: ResponseShape
    model: str
    fingerprint: str
    prompt_tokens: int
    with_usage: bool = False
    logprobs: Callable[[], LogprobsFormatter] | None = None
    parser: Callable[[], AnswerParser] = PlainTextParser
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def written(self, choices: Sequence["Choice"]) -> bytes:
        """The whole answer, of texts that have ended, in UTF-8. With the likelihoods of many tokens it has megabytes:
        it is written choice by choice and value by value, so that other threads run meanwhile and little is there."""
        writer = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
        each = ["".join(writer.iterencode(choice.whole())) for choice in choices]
        around = writer.encode(self._body(self.form.object, [], usage=self._usage(choices)))
        return around.replace('"choices":[]', f'"choices":[{",".join(each)}]', 1).encode()

    def chunk(self, choice: Json) -> Json:
        """A chunk with a part of one text."""
        return self._body(self.form.chunk, [choice], **({"usage": None} if self.with_usage else {}))

    def usage_chunk(self, choices: Sequence["Choice"]) -> list[Json]:
        """The chunk after all texts, which says how many tokens they took, where that was asked for."""
        return [self._body(self.form.chunk, [], usage=self._usage(choices))] if self.with_usage else []

    def _usage(self, choices: Sequence["Choice"]) -> Json:
        ends = [choice.end for choice in choices if choice.end is not None]
        completion_tokens = sum(end.tokens for end in ends)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": min((end.cached for end in ends), default=0)},
        }

    def _body(self, object: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": f"{self.form.prefix}-{self.id}",
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


class Choice:
    """One text of an answer, while it comes.

    begins -- whether nothing has come yet
    end    -- how it ended; None until then
    error  -- why it cannot be made; None: nothing says so
    """

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer, self._index = answer, index
        self._parser = answer.parser()
        self._logprobs = None if answer.logprobs is None else answer.logprobs()
        self._called = 0
        # What no chunk had yet:
        self._text, self._calls, self._tokens = "", list[ToolCall](), list[TokenLogprob]()
        self.begins = True
        self.end: Finish | None = None
        self.error: Exception | None = None

    def add(self, event: TextDelta | Finish) -> None:
        """Take what came of the text."""
        self.begins = False
        self._tokens += event.logprobs
        if isinstance(event, TextDelta):
            text, calls = self._parser.push(event.text)
        else:
            self.end = event
            text, calls = self._parser.finish()
        self._text += text
        self._calls += calls
        self._called += len(calls)

    def opening(self) -> list[Json]:
        """The chunks before any text."""
        opening = self._answer.form.opening
        return [] if opening is None else [self._chunk(opening)]

    def chunks(self) -> list[Json]:
        """The chunks of what came since the last ones, and of why the text ended where it has."""
        chunks, form = [], self._answer.form
        if self._text:
            chunks.append(self._chunk(form.piece(self._text), with_tokens=True))
        if self._calls:
            first = self._called - len(self._calls)
            calls = [{"index": n, **_call(call)} for n, call in enumerate(self._calls, first)]
            chunks.append(self._chunk({"delta": {"tool_calls": calls}}))
        self._text, self._calls = "", []
        return chunks if self.end is None else [*chunks, self._chunk(form.closing, self._reason(), with_tokens=True)]

    def whole(self) -> Json:
        """The text in one piece, once it has ended and where no chunk had a part of it."""
        content = self._answer.form.whole(self._text, [_call(call) for call in self._calls])
        return self._choice(content, self._reason(), with_tokens=True)

    def _reason(self) -> str:
        assert self.end is not None
        return "tool_calls" if self._called and self.end.reason == "stop" else self.end.reason

    def _chunk(self, content: Json, reason: str | None = None, with_tokens: bool = False) -> Json:
        return self._answer.chunk(self._choice(content, reason, with_tokens))

    def _choice(self, content: Json, reason: str | None, with_tokens: bool) -> Json:
        likely = None
        if self._logprobs is not None and with_tokens and self._tokens:
            likely = self._logprobs(self._tokens)
            self._tokens = []
        return {"index": self._index, **content, "logprobs": likely, "finish_reason": reason}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


END_OF_STREAM = b"data: [DONE]\n\n"
KEEP_ALIVE = b": the text is on its way\n\n"
"""The comment, which clients skip, shows that a connection lives that has nothing to say yet."""


def server_sent(body: Json) -> bytes:
    """A body as a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

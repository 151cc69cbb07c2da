"""The bodies of answers, whole and as server-sent events."""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparsepack.serve.worker import Ended

Json = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """What differs between completions and chat completions.

    prefix  -- of the answer's id
    object  -- the answer's kind, in one piece
    chunk   -- its kind in pieces
    whole   -- the text in a choice
    opening -- in the choice of the first chunk; None: there is no such chunk
    piece   -- a piece of text in the choice of a chunk
    closing -- in the choice of the chunk that tells why the text ended
    """

    prefix: str
    object: str
    chunk: str
    whole: Callable[[str], Json]
    opening: Json | None
    piece: Callable[[str], Json]
    closing: Json


COMPLETION = Form(
    prefix="cmpl",
    object="text_completion",
    chunk="text_completion",
    whole=lambda text: {"text": text},
    opening=None,
    piece=lambda text: {"text": text},
    closing={"text": ""},
)
CHAT = Form(
    prefix="chatcmpl",
    object="chat.completion",
    chunk="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
)


@dataclass(frozen=True)
class Answer:
    """One answer.

    model         -- the model's name
    fingerprint   -- changes with the model and what runs it
    prompt_tokens -- in the prompt, BOS included
    with_usage    -- whether the chunks have a usage, which is null in all but the last
    """

    form: Form
    model: str
    fingerprint: str
    prompt_tokens: int
    with_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def in_one_piece(self, text: str, ended: Ended) -> Json:
        """The whole answer."""
        choices = [_choice(self.form.whole(text), ended.reason)]
        return self._body(self.form.object, choices, usage=self._usage(ended))

    def opening(self) -> list[Json]:
        """The chunks before any text."""
        return [] if self.form.opening is None else [self._chunk(_choice(self.form.opening, None))]

    def piece(self, text: str) -> Json:
        """A chunk of text."""
        return self._chunk(_choice(self.form.piece(text), None))

    def closing(self, ended: Ended) -> list[Json]:
        """The chunks after the text: why it ended, and how many tokens it took where that was asked for."""
        last = [self._chunk(_choice(self.form.closing, ended.reason))]
        if self.with_usage:
            last.append(self._body(self.form.chunk, [], usage=self._usage(ended)))
        return last

    def _usage(self, ended: Ended) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": ended.tokens,
            "total_tokens": self.prompt_tokens + ended.tokens,
            "prompt_tokens_details": {"cached_tokens": ended.cached},
        }

    def _chunk(self, choice: Json) -> Json:
        return self._body(self.form.chunk, [choice], **({"usage": None} if self.with_usage else {}))

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


def _choice(content: Json, reason: str | None) -> Json:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


END_OF_STREAM = b"data: [DONE]\n\n"
STILL_THERE = b": the text is on its way\n\n"
"""The comment, which clients skip, shows that a connection lives that has nothing to say yet."""


def server_sent(body: Json) -> bytes:
    """A body as a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

"""OpenAI's completions and chat completions."""

import codecs
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepack.formats.manifest import SCORE
from sparsepack.runtime.generation.sampling import TokenLogprob
from sparsepack.serve.answer import Answer, AnswerWriter, Choice, Usage, server_sent
from sparsepack.serve.liberal import Json
from sparsepack.serve.protocols.protocol import ClientProtocol, Endpoint, Query
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, read_request
from sparsepack.serve.ticket import Timings
from sparsepack.serve.tools import ToolCall

if TYPE_CHECKING:
    from sparsepack.serve.app import Service

Bytes = Callable[[int], bytes]
"""What a token stands for, by its id."""

LogprobsFormatter = Callable[[Sequence[TokenLogprob]], dict[str, Any]]
"""What a choice or a chunk says of the next tokens of one text."""


def completion_logprobs(bytes_of: Bytes) -> LogprobsFormatter:
    """Lists of the same length, one element for each token. `top_logprobs` has the token itself, too; the first of a
    prompt has none. A token's offset is the number of characters that are whole before it."""
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
                None
                if token.logprob is None
                else {_text(bytes_of(id)): logprob for id, logprob in ((token.id, token.logprob), *reversed(token.top))}
                for token in tokens
            ],
            "text_offset": [offset_of(token) for token in tokens],
        }

    return said


def chat_logprobs(bytes_of: Bytes) -> LogprobsFormatter:
    """A record for each token."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
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


class OpenAIWriter(AnswerWriter):
    """What completions and chat completions have in common: an answer is a list of choices, a stream a list of chunks.

    prefix -- of the answer's id
    object -- the kind of an answer in one piece; `chunk` of one in chunks
    closing -- what the last choice of a stream has, which says why the sequence ended
    """

    prefix: str
    object: str
    chunk: str
    closing: ClassVar[Json]

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._logprobs: dict[int, LogprobsFormatter] = {}
        self._tokens: dict[int, int] = {}  # that each choice has, as of its last chunk

    @abstractmethod
    def message(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        """Return what a choice has in an answer in one piece."""

    @abstractmethod
    def pieces(self, text: str, reasoning: str, calls: list[Json]) -> list[Json]:
        """Return what the choices of a stream have for new text, reasoning and calls, in their order."""

    @abstractmethod
    def logprobs(self) -> LogprobsFormatter:
        """Return what writes the log-probabilities of one sequence."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        # With the likelihoods of many tokens an answer has megabytes: it is written choice by choice and value by
        # value, so that other threads run meanwhile and little is there.
        writer = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
        each = ["".join(writer.iterencode(self._whole(choice))) for choice in choices]
        around = writer.encode(self._body(self.object, [], **self._usage(choices)))
        return around.replace('"choices":[]', f'"choices":[{",".join(each)}]', 1).encode()

    def begin(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def delta(self, choice: Choice) -> bytes:
        self._tokens[choice.index] = choice.timings.tokens if choice.timings else 0
        first = choice.calls - len(choice.new.calls)
        new = choice.take()
        calls = [{"index": n, **_call(call)} for n, call in enumerate(new.calls, first)]
        contents = self.pieces(new.text, new.reasoning, calls)
        timings = choice.timings if self.answer.request.timings_per_token else None
        chunks = [
            self._chunk(self._choice(choice, content, with_tokens=not n), timings) for n, content in enumerate(contents)
        ]
        if choice.end is not None:
            closing = self._choice(choice, self.closing, finish_reason(choice), with_tokens=True)
            chunks.append(self._chunk(closing, choice.timings))
        return b"".join(chunks)

    def end(self, choices: Sequence[Choice]) -> bytes:
        usage = self._body(self.chunk, [], **self._usage(choices))
        return (server_sent(usage) if self.answer.request.includes_usage else b"") + END_OF_STREAM

    def failure(self, refusal: Refusal) -> bytes:
        return server_sent(refusal.body())

    def _whole(self, choice: Choice) -> Json:
        new = choice.take()
        content = self.message(new.text, new.reasoning, [_call(call) for call in new.calls])
        return self._choice(choice, content, finish_reason(choice), with_tokens=True)

    def _chunk(self, choice: Json, timings: Timings | None = None) -> bytes:
        usage: Json = {"usage": None} if self.answer.request.includes_usage else {}
        if (stream := self.answer.request.stream_options) is not None and stream.continuous_usage_stats:
            prompt, made = self.answer.prompt_tokens, sum(self._tokens.values())
            counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            usage = {"usage": counts}
        return server_sent(self._body(self.chunk, [choice], **usage, **timings_json(timings)))

    def _choice(self, choice: Choice, content: Json, reason: str | None = None, with_tokens: bool = False) -> Json:
        likely = None
        if with_tokens and choice.tokens:
            if choice.index not in self._logprobs:
                self._logprobs[choice.index] = self.logprobs()
            likely = self._logprobs[choice.index](choice.take_tokens())
        return {"index": choice.index, **content, "logprobs": likely, "finish_reason": reason}

    def _usage(self, choices: Sequence[Choice]) -> Json:
        usage = Usage.of(self.answer, choices)
        tokens = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }
        return {"usage": tokens, **timings_json(choices[0].timings)}

    def _body(self, object: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": f"{self.prefix}-{self.answer.id}",
            "object": object,
            "created": self.answer.created,
            "model": self.answer.model,
            "system_fingerprint": self.answer.fingerprint,
            "choices": choices,
            **more,
        }


class CompletionWriter(OpenAIWriter):
    """Answers of /v1/completions."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def message(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        return {"text": text}

    def pieces(self, text: str, reasoning: str, calls: list[Json]) -> list[Json]:
        return [{"text": text}] if text else []

    def logprobs(self) -> LogprobsFormatter:
        return completion_logprobs(self.answer.bytes_of)


class ChatWriter(OpenAIWriter):
    """Answers of /v1/chat/completions."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    closing: ClassVar[Json] = {"delta": {}}

    def message(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def begin(self, choices: Sequence[Choice]) -> bytes:
        opening = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(self._choice(choice, opening)) for choice in choices)

    def pieces(self, text: str, reasoning: str, calls: list[Json]) -> list[Json]:
        deltas = (("reasoning_content", reasoning), ("content", text), ("tool_calls", calls))
        return [{"delta": {name: value}} for name, value in deltas if value]

    def logprobs(self) -> LogprobsFormatter:
        return chat_logprobs(self.answer.bytes_of)


def finish_reason(choice: Choice) -> str:
    """Return why a sequence ended, in OpenAI's words."""
    assert choice.end is not None
    return "tool_calls" if choice.calls and choice.end.reason == "stop" else choice.end.reason


def timings_json(timings: Timings | None) -> Json:
    """Return llama.cpp's `timings`, with what was skipped; nothing for None."""
    if timings is None:
        return {}
    prompt = timings.prompt_seconds
    figures = {
        "prompt_n": timings.prompt_tokens,
        "prompt_ms": 1e3 * prompt,
        "prompt_per_second": timings.prompt_tokens / prompt if prompt else None,
        "predicted_n": timings.tokens,
        "predicted_ms": 1e3 * timings.decode_seconds,
        "predicted_per_second": timings.tokens_per_second,
        "skipped": timings.skipped,
        "bits_read": timings.bits_read,
    }
    return {"timings": {name: value if value is None else round(value, 4) for name, value in figures.items()}}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def models(body: bytes, service: "Service") -> Json:
    """Return the list of models, which has one."""
    return {"object": "list", "data": [model(body, service, service.name)]}


def model(body: bytes, service: "Service", name: str) -> Json:
    """Return the model. Raises `Refusal` 404 for another name."""
    service.preparer.check_model(name)
    packed = service.prompts.model.packed
    about = {
        "format": packed.manifest["kind"],
        "bits": {"stored": packed.block_bits, "target": packed.block_bits * (1 - packed.target)},
        "score": packed.manifest.get(SCORE),
        "suggested": dict(packed.generation),
    }
    common = {"id": name, "object": "model", "created": service.created, "owned_by": "sparsepack"}
    return {**common, "max_model_len": service.prompts.context, "sparsepack": about}


END_OF_STREAM = b"data: [DONE]\n\n"

OPENAI = ClientProtocol(
    endpoints=(
        Endpoint(
            "/v1/completions",
            lambda body, service: read_request(CompletionRequest, body, service.options.strict),
            CompletionWriter,
            token_ids=True,
        ),
        Endpoint(
            "/v1/chat/completions",
            lambda body, service: read_request(ChatRequest, body, service.options.strict),
            ChatWriter,
        ),
    ),
    queries=(Query("GET", "/v1/models", models), Query("GET", "/v1/models/{name:path}", model)),
)

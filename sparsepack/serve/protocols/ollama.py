"""Ollama's chat and generate, and what its clients ask about models."""

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from sparsepack.serve.answer import Answer, AnswerWriter, Choice, Usage, json_bytes
from sparsepack.serve.liberal import Json, unsupported
from sparsepack.serve.messages import Part
from sparsepack.serve.protocols.openai import chat_logprobs
from sparsepack.serve.protocols.protocol import ClientProtocol, Endpoint, Query, check_one_answer
from sparsepack.serve.protocols.tokens import refuse_embeddings
from sparsepack.serve.reasoning import reasoning_format
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters, read_request
from sparsepack.serve.tools import ToolCall

if TYPE_CHECKING:
    from sparsepack.serve.app import Service

PROTOCOL_VERSION = "0.12.0"
"""The version of Ollama whose requests are known here; clients ask for it, and some want a newer one than 0.6."""

TAG = ":latest"

IGNORED_OPTIONS = frozenset(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap"))
"""Options of how a model is loaded: this server's is loaded already."""


class OllamaMessage(Part):
    """A message; arguments of calls are objects."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_images(self) -> "OllamaMessage":
        _refuse(self.images, "images", "this server reads text only; leave them out")
        return self

    def for_chat(self) -> Json:
        """Return the message as `schema.Message` has it."""
        calls = [{"id": call.get("id"), "function": call.get("function")} for call in self.tool_calls or ()]
        return {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thinking,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }


class OllamaBody(Part):
    """What the bodies of /api/chat and /api/generate share.

    format     -- "json", or a JSON schema
    options    -- how tokens are chosen
    think      -- whether the model may reason before its answer, or how much: "low", "medium" or "high"
    keep_alive -- ignored: the model stays
    """

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def parameters(self) -> Json:
        """Return the fields of `TextParameters`."""
        options = (self.options or {}).items()
        given = {name: value for name, value in options if name not in IGNORED_OPTIONS and value is not None}
        if isinstance(self.format, dict):
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            given["response_format"] = {"type": self.format}
        return {**given, "model": (self.model or "").removesuffix(TAG), "stream": self.stream is not False}

    def chat(self, messages: list[Json], tools: list[Any] | None = None) -> Json:
        """Return the body of a `ChatRequest`."""
        chat = {**self.parameters(), "messages": messages, "tools": tools, "logprobs": self.logprobs}
        chat["top_logprobs"] = self.top_logprobs
        if self.think is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
            chat["reasoning_effort"] = self.think if isinstance(self.think, str) else None
        return chat


class ChatBody(OllamaBody):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: list[Any] | None = None


class GenerateBody(OllamaBody):
    """The body of POST /api/generate.

    raw -- the prompt is continued as it stands, without the chat template
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> "GenerateBody":
        _refuse(self.images, "images", "this server reads text only; leave them out")
        _refuse(self.template, "template", "the model's own is used; give raw: true with a prompt that is complete")
        _refuse(self.suffix, "suffix", "not supported by this server; leave it out")
        return self


def _refuse(value: Any, name: str, reason: str) -> None:
    if value:
        raise unsupported(name, reason)


class LoadRequest(CompletionRequest):
    """A request without a prompt, by which clients have the model loaded: nothing is made."""


def read_chat(body: bytes, service: "Service") -> TextParameters:
    """Read a body of /api/chat. Raises `Refusal`."""
    given = read_request(ChatBody, body, service.options.strict)
    if not given.messages:
        return _load(given)
    messages = [message.for_chat() for message in given.messages]
    return _request(ChatRequest, given.chat(messages, given.tools), service)


def read_generate(body: bytes, service: "Service") -> TextParameters:
    """Read a body of /api/generate: a chat of one message, or a prompt to continue where it is raw or the model has no
    chat template. Raises `Refusal`."""
    given = read_request(GenerateBody, body, service.options.strict)
    if not given.prompt:
        return _load(given)
    if not given.raw and service.prompts.model.template(with_tools=False) is not None:
        system = [{"role": "system", "content": given.system}] if given.system else []
        return _request(ChatRequest, given.chat([*system, {"role": "user", "content": given.prompt}]), service)
    logprobs = (given.top_logprobs or 0) if given.logprobs else None
    completion = {"num_predict": -1, **given.parameters(), "prompt": given.prompt, "logprobs": logprobs}
    return _request(CompletionRequest, completion, service)


def _request(kind: type[TextParameters], body: Json, service: "Service") -> TextParameters:
    check_one_answer(body)
    return read_request(kind, json.dumps(body).encode(), service.options.strict)


def _load(given: OllamaBody) -> LoadRequest:
    model = (given.model or "").removesuffix(TAG)
    return LoadRequest(model=model, prompt=[0], max_tokens=0, stream=given.stream is not False)


class OllamaWriter(AnswerWriter):
    """Writes an answer as JSON, a stream as a line of JSON for each piece."""

    content_type = "application/x-ndjson"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._began = time.monotonic()
        self.keep_alive = self._line(self.part("", "", []))

    @abstractmethod
    def part(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        """Return what an answer, or a piece of it, has of these."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        return json_bytes(self._body({**self._new(choice), **self._end(choice)}))

    def begin(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def delta(self, choice: Choice) -> bytes:
        nothing = (choice.new.text, choice.new.reasoning, choice.new.calls) == ("", "", ())
        return b"" if nothing else self._line(self._new(choice))

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        return self._line({**self._new(choice), **self._end(choice)})

    def failure(self, refusal: Refusal) -> bytes:
        return json_bytes(error_body(refusal)) + b"\n"

    def _new(self, choice: Choice) -> Json:
        """Return what came of a sequence since the last call."""
        new = choice.take()
        part = self.part(new.text, new.reasoning, list(map(_call, new.calls)))
        if tokens := choice.take_tokens():
            part["logprobs"] = chat_logprobs(self.answer.bytes_of)(tokens)["content"]
        return part

    def _end(self, choice: Choice) -> Json:
        """Return what the last piece has: why the sequence ended, and tokens and times in nanoseconds."""
        assert choice.end is not None
        if isinstance(self.answer.request, LoadRequest):
            return {"done": True, "done_reason": "load"}
        timings, usage = choice.timings, Usage.of(self.answer, [choice])
        return {
            "done": True,
            "done_reason": choice.end.reason,
            "total_duration": round((time.monotonic() - self._began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": round(timings.prompt_seconds * 1e9) if timings else 0,
            "eval_count": usage.completion,
            "eval_duration": round(timings.decode_seconds * 1e9) if timings else 0,
        }

    def _body(self, part: Json) -> Json:
        return {"model": self.answer.model + TAG, "created_at": _time(time.time()), "done": False, **part}

    def _line(self, part: Json) -> bytes:
        return json_bytes(self._body(part)) + b"\n"


class ChatLines(OllamaWriter):
    """Answers of /api/chat."""

    def part(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        more: Json = {"thinking": reasoning} if reasoning else {}
        more |= {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **more}}


class GenerateLines(OllamaWriter):
    """Answers of /api/generate."""

    def part(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def error_body(refusal: Refusal) -> Json:
    """Return the body of an answer that refuses a request."""
    return {"error": refusal.message}


def _model(service: "Service") -> Json:
    """Return what lists say of the one model. `size` is that of its blocks' weights, in bytes."""
    packed = service.prompts.model.packed
    count = sum(packed.parameters.values())
    family = packed.architecture.model_type
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M",
        "quantization_level": packed.manifest["kind"],
    }
    return {
        "name": service.name + TAG,
        "model": service.name + TAG,
        "modified_at": _time(service.created),
        "size": round(count * packed.block_bits / 8),
        "digest": service.fingerprint.removeprefix("fp_"),
        "details": details,
    }


def tags(body: bytes, service: "Service") -> Json:
    """Return the one model."""
    return {"models": [_model(service)]}


def running(body: bytes, service: "Service") -> Json:
    """Return the one model, which stays loaded."""
    model = _model(service)
    del model["modified_at"]
    on_gpu = service.prompts.model.engine.device.type != "cpu"
    stays = {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": model["size"] if on_gpu else 0,
        "context_length": service.prompts.context,
    }
    return {"models": [{**model, **stays}]}


class ShowBody(Part):
    """The body of POST /api/show; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    options: dict[str, Any] | None = None


def show(body: bytes, service: "Service") -> Json:
    """Return what is known of the model. Raises `Refusal` 404 for another one."""
    given = read_request(ShowBody, body, service.options.strict)
    service.preparer.check_model((given.model or given.name or service.name).removesuffix(TAG))
    model, one = service.prompts.model, _model(service)
    template = model.template(with_tools=True) or ""
    reasons = "enable_thinking" in template or reasoning_format(template) is not None
    family = model.packed.architecture.model_type
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in model.packed.generation.items()),
        "template": template,
        "modified_at": one["modified_at"],
        "details": one["details"],
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": sum(model.packed.parameters.values()),
            f"{family}.context_length": service.prompts.context,
        },
        "capabilities": ["completion", "tools", *(["thinking"] if reasons else [])],
    }


OLLAMA = ClientProtocol(
    endpoints=(
        Endpoint("/api/chat", read_chat, ChatLines),
        Endpoint("/api/generate", read_generate, GenerateLines),
    ),
    queries=(
        Query("GET", "/api/tags", tags),
        Query("POST", "/api/show", show),
        Query("GET", "/api/ps", running),
        Query("GET", "/api/version", lambda body, service: {"version": PROTOCOL_VERSION}),
        Query("POST", "/api/embed", refuse_embeddings),
        Query("POST", "/api/embeddings", refuse_embeddings),
    ),
    error=error_body,
)

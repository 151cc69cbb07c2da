"""Anthropic's messages."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator

from sparsepack.serve.answer import Choice, Usage, server_sent
from sparsepack.serve.liberal import Json, unsupported
from sparsepack.serve.protocols.parts import (
    AnswerPart,
    AsParts,
    Part,
    PartsWriter,
    TextPart,
    TextParts,
    append_message,
    by_type,
    joined,
)
from sparsepack.serve.protocols.protocol import ClientProtocol, Endpoint, Query, check_one_answer
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, Count, read_request

if TYPE_CHECKING:
    from sparsepack.serve.app import Service


class ThinkingBlock(Part):
    """What the model wrote before its answer, for itself. `signature` is ignored."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Reasoning that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Part):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    """What a call gave. `is_error` is ignored: the content says so."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextParts | None = None


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


Block = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    by_type(BLOCKS, "; this server reads no images and no files"),
]


class AnthropicMessage(Part):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], AsParts]

    def add_to(self, messages: list[Json]) -> None:
        """Add it to a conversation of `ChatRequest`, in which a call's result is a message of its own."""
        for block in self.content:
            match block:
                case ToolResultBlock():
                    result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}
                    append_message(messages, result)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input)}
                    call = {"id": block.id, "type": "function", "function": function}
                    append_message(messages, {"role": self.role, "content": "", "tool_calls": [call]})
                case ThinkingBlock():
                    append_message(messages, {"role": self.role, "content": "", "reasoning_content": block.thinking})
                case TextPart():
                    append_message(messages, {"role": self.role, "content": block.text})
        if not self.content:
            append_message(messages, {"role": self.role, "content": ""})


class AnthropicTool(Part):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and (kind := tool.get("type") or "custom") != "custom":
            remedy = "this server runs no tools of its own; give functions with name and input_schema"
            raise unsupported("type", f"{str(kind)[:100]}: {remedy}")
        return tool


class AnthropicToolChoice(Part):
    """Which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise unsupported("name", "it goes with the type tool, and with no other")
        return self


class Thinking(Part):
    """Whether the model may reason before its answer; `budget_tokens` is ignored."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Part):
    """The schema that the text keeps to."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    """What the answer is to be."""

    format: OutputFormat | None = None
    effort: str | None = None


class Conversation(BaseModel):
    """The body of POST /v1/messages/count_tokens, and the part of /v1/messages that makes the prompt. Other fields are
    those of `ChatRequest`, or unknown there, too."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: TextParts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None

    ignored: ClassVar = frozenset(
        ("cache_control", "container", "context_management", "inference_geo", "metadata", "service_tier", "speed")
    )

    def for_chat(self) -> Json:
        """Return the body of `ChatRequest` for it."""
        messages: list[Json] = [{"role": "system", "content": joined(self.system)}] if self.system else []
        for message in self.messages:
            message.add_to(messages)
        chat = {name: value for name, value in (self.model_extra or {}).items() if name not in self.ignored}
        chat["messages"] = messages
        if self.tools:
            functions = [(tool, {"parameters": tool.input_schema}) for tool in self.tools]
            chat["tools"] = [
                {"type": "function", "function": {"name": tool.name, "description": tool.description, **function}}
                for tool, function in functions
            ]
        if self.tools and self.tool_choice is not None:
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            chat["tool_choice"] = {"any": "required", "tool": named}.get(self.tool_choice.type, self.tool_choice.type)
            if self.tool_choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        if self.thinking is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return chat


class MessagesBody(Conversation):
    """The body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def for_chat(self) -> Json:
        format = self.output_format or (self.output_config and self.output_config.format)
        chat = {**super().for_chat(), "max_tokens": self.max_tokens}
        if self.stop_sequences is not None:
            chat["stop"] = self.stop_sequences
        if self.output_config is not None and self.output_config.effort is not None:
            chat["reasoning_effort"] = self.output_config.effort
        if format:
            schema = {"name": "output", "schema": format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat


class MessagesRequest(ChatRequest):
    """A request of this protocol. Clients must give a number of tokens, and often do not know the context: what does
    not fit is left out, and `stop_reason` says so."""

    clips_max_tokens: ClassVar[bool] = True


def read_messages(body: bytes, service: "Service", kind: type[Conversation] = MessagesBody) -> MessagesRequest:
    """Read a body as a chat. Raises `Refusal`."""
    strict = service.options.strict
    chat = read_request(kind, body, strict, expected={}).for_chat()
    check_one_answer(chat)
    return read_request(MessagesRequest, json.dumps(chat).encode(), strict)


def count_tokens(body: bytes, service: "Service") -> Json:
    """Return how many tokens a conversation's prompt has. Raises `Refusal`."""
    return {"input_tokens": len(service.preparer.chat_tokens(read_messages(body, service, Conversation)))}


class MessageWriter(PartsWriter):
    """Answers of /v1/messages."""

    keep_alive = server_sent({"type": "ping"}, "ping")

    def begin(self, choices: Sequence[Choice]) -> bytes:
        usage = {"input_tokens": self.answer.prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def opening(self, part: AnswerPart) -> bytes:
        return _event("content_block_start", index=part.index, content_block=_block(part, whole=False))

    def piece(self, part: AnswerPart, text: str) -> bytes:
        kind, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[part.kind]
        return _event("content_block_delta", index=part.index, delta={"type": kind, name: text})

    def closing(self, part: AnswerPart) -> bytes:
        return _event("content_block_stop", index=part.index)

    def end(self, choices: Sequence[Choice]) -> bytes:
        reason, stop = self._stop(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", delta=delta, usage=self._usage(choices)) + _event("message_stop")

    def failure(self, refusal: Refusal) -> bytes:
        return server_sent(error_body(refusal), "error")

    def body(self, choice: Choice) -> Json:
        content = [_block(part) for part in self.parts]
        return self._message(content, *self._stop(choice), self._usage([choice]))

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        """Return why the answer ended, and the stop string that ended it."""
        assert choice.end is not None
        if choice.end.reason == "length":
            clipped = choice.end.tokens < (self.answer.request.max_new_tokens or 0)
            return "model_context_window_exceeded" if clipped else "max_tokens", None
        if choice.calls:
            return "tool_use", None
        return "end_turn" if choice.end.stop is None else "stop_sequence", choice.end.stop

    def _usage(self, choices: Sequence[Choice]) -> Json:
        usage = Usage.of(self.answer, choices)
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }

    def _message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": f"msg_{self.answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _event(kind: str, **more: Any) -> bytes:
    return server_sent({"type": kind, **more}, kind)


def _block(part: AnswerPart, whole: bool = True) -> Json:
    """Return a part as a content block, which is empty where a stream begins it."""
    text = part.text if whole else ""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    assert part.call is not None
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": json.loads(text or "{}")}


ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""The types of errors by status; else of 400 and more `invalid_request_error`, of 500 and more `api_error`."""


def error_body(refusal: Refusal) -> Json:
    """Return the body of an answer that refuses a request."""
    kind = ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


ANTHROPIC = ClientProtocol(
    endpoints=(Endpoint("/v1/messages", read_messages, MessageWriter),),
    queries=(Query("POST", "/v1/messages/count_tokens", count_tokens),),
    error=error_body,
)

"""OpenAI's Responses."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator
from pydantic_core import from_json

from sparsepack.serve.answer import Answer, Choice, Usage, server_sent
from sparsepack.serve.liberal import Json, check_neutral, unsupported
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
from sparsepack.serve.protocols.protocol import ClientProtocol, Endpoint, Query
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, Count, read_request

if TYPE_CHECKING:
    from sparsepack.serve.app import Service


class RefusalPart(Part):
    """A model's refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class MessageItem(Part):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], AsParts]

    def message(self) -> Json:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class FunctionCallItem(Part):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str

    def message(self) -> Json:
        return _call_message(self.call_id, self.name, self.arguments)


class FunctionCallOutputItem(Part):
    """What a call gave."""

    call_id: str
    output: TextParts

    def message(self) -> Json:
        return {"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)}


class ReasoningItem(Part):
    """What the model wrote before its answer, for itself; what OpenAI encrypted of it is left out."""

    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None

    def message(self) -> Json:
        return {"role": "assistant", "content": "", "reasoning_content": joined(self.content or self.summary)}


ITEMS = ("message", "function_call", "function_call_output", "reasoning")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    by_type(ITEMS, default="message"),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Part):
    """A function that the model may call. `strict` is ignored."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and (kind := tool.get("type")) != "function":
            remedy = "this server runs no tools of its own; give tools of type function"
            raise unsupported("type", f"{str(kind)[:100]}: {remedy}")
        return tool


class FunctionChoice(Part):
    """The function that must be called, or one of those that may."""

    type: Literal["function"]
    name: str


class AllowedTools(Part):
    """The tools, of those given, that may be called now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class TextFormat(Part):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Reasoning(Part):
    """How much the model reasons before its answer, for templates that have it; `summary` is ignored."""

    effort: str | None = None


class TextConfig(Part):
    """What the text is to be; `verbosity` is ignored."""

    format: TextFormat | None = None


NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "conversation": (),
        "messages": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "n": (1,),
    }
)
"""These parameters are taken with these values, or null, alone."""


class ResponsesBody(BaseModel):
    """The body of POST /v1/responses. Other fields are those of `ChatRequest`, or unknown there, too."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_neutral(body, NEUTRAL)
        return {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}

    @model_validator(mode="after")
    def _check_allowed_tools(self) -> "ResponsesBody":
        if self.tools and isinstance(self.tool_choice, AllowedTools):
            names = {tool.name for tool in self.tools}
            for tool in self.tool_choice.tools:
                if tool.name not in names:
                    raise unsupported("tool_choice", f"{tool.name!r} is none of the tools")
        return self

    def for_chat(self, conversation: Sequence[Json]) -> Json:
        """Return the body of `ChatRequest` for it, which has this conversation."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for message in conversation:
            append_message(messages, dict(message))
        chat = {**(self.model_extra or {}), "messages": messages}
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, AllowedTools):
            names = [tool.name for tool in choice.tools]
            tools, choice = [tool for tool in tools if tool.name in names], choice.mode
        if tools:
            chat["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
            chat["tool_choice"] = choice.model_dump() if isinstance(choice, FunctionChoice) else choice
        format = self.text and self.text.format
        if format:
            schema = {"schema": format.schema_ or {}} if format.type == "json_schema" else {}
            chat["response_format"] = {"type": format.type, **schema}
        return chat


IGNORED = frozenset(("include", "max_tool_calls", "metadata", "stream_options"))
"""These parameters say nothing about the text, and are none of `ChatRequest`."""


class ResponsesRequest(ChatRequest):
    """A request of this protocol.

    repeated     -- of the body, what the answer repeats
    conversation -- messages, without the instructions
    stored       -- where the answer is kept; None: nowhere
    """

    repeated: Any = None
    conversation: Any = None
    stored: Any = None


def read_responses(body: bytes, service: "Service") -> ResponsesRequest:
    """Read a body as a chat. Raises `Refusal`."""
    strict = service.options.strict
    given = read_request(ResponsesBody, body, strict, EXPECTED)
    previous = given.previous_response_id
    conversation = [] if previous is None else service.stored_responses.conversation(previous)
    for item in given.input:
        append_message(conversation, item.message())
    request = read_request(ResponsesRequest, json.dumps(given.for_chat(conversation)).encode(), strict)
    try:
        sent = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    repeated = {name: default if sent.get(name) is None else sent[name] for name, default in REPEATED.items()}
    stored = None if given.store is False else service.stored_responses
    return request.model_copy(update={"repeated": repeated, "conversation": conversation, "stored": stored})


EXPECTED = MappingProxyType(
    {"tool_choice": 'expected "none", "auto", "required", {"type": "function", "name": NAME} or allowed_tools'}
)
"""What is said of a wrong value of a parameter with several forms."""

REPEATED: Mapping[str, Any] = MappingProxyType(
    {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
)
"""What an answer repeats of its request, and what stands there where that has none."""


class ResponseWriter(PartsWriter):
    """Answers of /v1/responses."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        assert isinstance(answer.request, ResponsesRequest)
        self._request = answer.request
        self._events = 0

    def begin(self, choices: Sequence[Choice]) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opening(self, part: AnswerPart) -> bytes:
        item = self._item(part, "in_progress")
        events = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind != "call":
            events += self._event("response.content_part.added", **self._place(part), part=_content(part, whole=False))
        return events

    def piece(self, part: AnswerPart, text: str) -> bytes:
        logprobs: Json = {"logprobs": []} if part.kind == "text" else {}
        return self._event(f"response.{DELTAS[part.kind]}.delta", **self._place(part), delta=text, **logprobs)

    def closing(self, part: AnswerPart) -> bytes:
        if part.call is not None:
            named = {"name": part.call.name, "arguments": part.text}
            events = self._event("response.function_call_arguments.done", **self._place(part), **named)
        else:
            more: Json = {"text": part.text, **({"logprobs": []} if part.kind == "text" else {})}
            events = self._event(f"response.{DELTAS[part.kind]}.done", **self._place(part), **more)
            events += self._event("response.content_part.done", **self._place(part), part=_content(part))
        return events + self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def end(self, choices: Sequence[Choice]) -> bytes:
        response = self.body(choices[0])
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        error = {"code": "server_error", "message": refusal.message}
        return self._event("response.failed", response=self._response("failed", error=error))

    def body(self, choice: Choice) -> Json:
        assert choice.end is not None
        usage = Usage.of(self.answer, [choice])
        incomplete = choice.end.reason == "length"
        response = self._response(
            "incomplete" if incomplete else "completed",
            incomplete_details={"reason": "max_output_tokens"} if incomplete else None,
            output=[self._item(part) for part in self.parts],
            usage={
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        )
        if self._request.stored is not None:
            conversation = [*self._request.conversation]
            for part in self.parts:
                append_message(conversation, _message(part))
            self._request.stored.put(self.answer.client, response, conversation)
        return response

    def _event(self, kind: str, **more: Any) -> bytes:
        self._events += 1
        return server_sent({"type": kind, "sequence_number": self._events - 1, **more}, kind)

    def _place(self, part: AnswerPart) -> Json:
        content = {} if part.kind == "call" else {"content_index": 0}
        return {"item_id": self._id(part), "output_index": part.index, **content}

    def _id(self, part: AnswerPart) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[part.kind]
        return f"{prefix}_{self.answer.id}{part.index:02}"

    def _item(self, part: AnswerPart, status: str = "completed") -> Json:
        """Return a part as an item of the output, which is empty while it is in progress."""
        whole = status == "completed"
        content = [_content(part)] if whole else []
        common = {"id": self._id(part), "status": status}
        if part.kind == "text":
            return {**common, "type": "message", "role": "assistant", "content": content}
        if part.kind == "reasoning":
            return {**common, "type": "reasoning", "summary": [], "content": content}
        assert part.call is not None
        named = {"call_id": part.call.id, "name": part.call.name}
        return {**common, "type": "function_call", **named, "arguments": part.text if whole else ""}

    def _response(self, status: str, **more: Any) -> Json:
        return {
            "id": f"resp_{self.answer.id}",
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "model": self.answer.model,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._request.repeated,
            **more,
        }


DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""The names of events with a piece of a part."""


def _content(part: AnswerPart, whole: bool = True) -> Json:
    """Return the content of text or reasoning, which is empty where a stream begins it."""
    text = part.text if whole else ""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(part: AnswerPart) -> Json:
    """Return a part of an answer as a message of `ChatRequest`."""
    if part.call is not None:
        return _call_message(part.call.id, part.call.name, part.text)
    reasoning = {"reasoning_content": part.text} if part.kind == "reasoning" else {}
    return {"role": "assistant", "content": "" if reasoning else part.text, **reasoning}


def _call_message(id: str, name: str, arguments: str) -> Json:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _delete(body: bytes, service: "Service", id: str) -> Json:
    service.stored_responses.delete(id)
    return {"id": id, "object": "response", "deleted": True}


RESPONSES = ClientProtocol(
    endpoints=(Endpoint("/v1/responses", read_responses, ResponseWriter),),
    queries=(
        Query("GET", "/v1/responses/{id}", lambda body, service, id: service.stored_responses.response(id)),
        Query("DELETE", "/v1/responses/{id}", _delete),
    ),
)

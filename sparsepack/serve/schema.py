"""The bodies of requests: which of OpenAI's parameters are taken, and which are refused.

Each parameter of the protocol has one of three fates. It does something; or it can have no influence on the text and is
ignored (`IGNORED`); or it would have one that this server does not have, and is taken with its neutral value alone
(`NEUTRAL`). A parameter that the protocol does not know is refused, as OpenAI does.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sparsepack.option import LARGEST_COUNT
from sparsepack.serve.guards import MAX_JSON_VALUES, check_values
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tools import JSON_DECODER

CONTENT = "expected a text, or a list of parts of type text"


def unsupported(name: str, reason: str) -> PydanticCustomError:
    """The error of a parameter, within what is validated, that this server does not take as it is."""
    return PydanticCustomError("unsupported", "{name}: {reason}", {"name": name, "reason": reason})


class ContentPart(BaseModel):
    """A part of a message; only text is taken, by the names that OpenAI's protocols have for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(BaseModel):
    """A function that the model called, with its arguments in JSON; an empty text stands for none."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates take it: they write the arguments themselves."""
        return {"name": self.name, "arguments": JSON_DECODER.decode(self.arguments or "{}")}

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "CalledFunction":
        check_values(self.arguments.encode(), MAX_JSON_VALUES)
        try:
            read = JSON_DECODER.decode(self.arguments or "{}")
            json.dumps(read, ensure_ascii=False).encode()  # no half of a character of UTF-16, which no tokenizer takes
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise unsupported("arguments", "expected a JSON object, as text")
        return self


class CalledTool(BaseModel):
    """A call in an answer that the client sends back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(BaseModel):
    """A message of a chat. `developer` is today's word for `system`; `name` is ignored. A message of the role `tool` is
    what a call gave."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[CalledTool], Field(min_length=1, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _what_its_role_has(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise unsupported("tool_calls", "only in messages of the role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise unsupported("tool_call_id", "it goes with the role tool, and with no other")
        if self.content is None and self.tool_calls is None:
            raise unsupported("content", CONTENT)
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.for_template()} for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Function(BaseModel):
    """A function that the model may call. `strict` is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; functions are the only ones."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": {"description": "", "parameters": {}, **function}}


class FunctionName(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: str


class ChosenTool(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["function"]
    function: FunctionName


IGNORED = frozenset(
    (
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    )
)
"""These parameters say nothing about the text."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "suffix": ("",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
"""These parameters are taken with these values, or null, alone."""

MOST_PARAMETERS = 100

MOST_CHOICES = 16
"""A request asks for at most this many texts after one prompt."""

LONGEST_GRAMMAR = 2**14
"""A grammar has at most this many characters."""

MAX_BIASES = 1024
"""A request changes the logits of at most this many tokens."""

MAX_STOPS = 4
"""A request has at most this many stop strings, as many as OpenAI takes."""

MAX_STOP_LENGTH = 1000
"""A stop string has at most this many characters: as much text is held back from a stream."""

R = TypeVar("R", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    """What a request says of its stream.

    include_usage       -- a last event tells how many tokens there were
    include_obfuscation -- the field is ignored, because it says nothing about the text
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(BaseModel):
    """The schema that a text keeps to. `strict` is ignored: every text keeps to it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What kind of text is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise unsupported("json_schema", "it goes with the type json_schema, and with no other")
        return self


class TextParameters(BaseModel, ABC):
    """What both ways of asking for a text share. `top_k`, `min_p`, `repeat_penalty` and `grammar` are not in OpenAI's
    protocol, but in most servers of it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    clips_max_tokens: ClassVar[bool] = False
    """Whether tokens that the context has no room for are left out, or refused."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=LONGEST_GRAMMAR)] | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None  # vLLM's: no prefix is shared beyond it

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_PARAMETERS:
            raise unsupported("body", f"{len(body):,} parameters; the protocol has fewer than {MOST_PARAMETERS}")
        for name, accepted in NEUTRAL.items():
            value = body.get(name)
            same = (type(value) is type(other) and value == other for other in accepted)  # Python has true for 1
            if value is not None and not any(same):
                values = " or ".join(json.dumps(other) for other in accepted)
                remedy = f"; leave it out{f' or give {values}' if accepted else ''}"
                raise unsupported(name, f"not supported by this server{remedy}")
        return {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}

    @model_validator(mode="after")
    def _what_goes_together(self) -> "TextParameters":
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "only with stream: true")
        if self.grammar is not None and self.requires_json:
            raise unsupported("grammar", "not with a response_format; give one of them")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def requires_json(self) -> bool:
        """Whether the response format asks for JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    @abstractmethod
    def logprobs_count(self) -> int | None:
        """How many of the logprobs_count tokens are told in each place of the text; None: nothing is told of them."""

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens are asked for at most; None: as many as there is room for."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _form_of_prompt(prompt: Any) -> str:
    """Which of its forms a prompt must have: only that one is tried, since a try looks at every element."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


class CompletionRequest(TextParameters):
    """The body of POST /v1/completions.

    prompt     -- a text, before which BOS goes where the model has one; or tokens, taken as they are. A list of one
                  text or of one list of tokens is that one.
    max_tokens -- 16 unless given, as at OpenAI
    logprobs   -- how many of the logprobs_count tokens are told in each place
    """

    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[list[str], Field(min_length=1, max_length=1), Tag("texts")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1), Tag("lists")],
        Discriminator(_form_of_prompt),
    ] = ""

    @property
    def prompt_value(self) -> str | list[int]:
        """The prompt, taken out of a list of one."""
        first = self.prompt if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt[0]
        return first  # type: ignore[return-value]

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens are asked for at most."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs


class ChatRequest(TextParameters):
    """The body of POST /v1/chat/completions; without a number of tokens the answer ends where the model ends it, or
    where the context is full."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _one_number_of_tokens(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise unsupported("max_completion_tokens", "not with max_tokens; give one of them")
        return self

    @model_validator(mode="after")
    def _what_a_chat_s_parameters_need(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise unsupported("top_logprobs", "only with logprobs: true")
        if self.requires_tool_call and not self.tools:
            raise unsupported("tool_choice", "only with tools")
        if self.requires_tool_call and (self.grammar is not None or self.requires_json):
            raise unsupported("tool_choice", "a call that must be made keeps to no other format; leave one out")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise unsupported("tool_choice", f"{self.tool_choice.function.name!r} is none of the tools")
        return self

    @property
    def requires_tool_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, ChosenTool) else None
        tools = () if choice == "none" else self.tools or ()
        return tuple(tool for tool in tools if named in (None, tool.function.name))

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens are asked for at most; None: as many as there is room for."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


def read_request(kind: type[R], body: bytes) -> R:
    """A request from its body. Raises `Refusal` 400, naming the first parameter that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


_EXPECTED = {
    "prompt": "expected a text, a list of token ids, or a list of one text or of one list of token ids",
    "stop": f"expected a text, or at most {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} characters",
    "content": CONTENT,
    "logit_bias": f'expected {{"TOKEN ID": BIAS, ...}}, at most {MAX_BIASES:,} of them, each bias from -100 to 100',
    "tool_choice": 'expected "none", "auto", "required", or {"type": "function", "function": {"name": NAME}}',
}
"""These parameters may have several forms, of which the library would tell what the first one lacks."""


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "unsupported":
        name = ".".join(str(part) for part in (*first["loc"], first["ctx"]["name"]))
        return Refusal(400, f"{name}: {first['ctx']['reason']}", name, "unsupported_value")
    forms = next((n for n, part in enumerate(first["loc"], 1) if part in _EXPECTED), None)
    name = ".".join(str(part) for part in first["loc"][:forms])
    if forms:
        return Refusal(400, f"{name}: {_EXPECTED[str(first['loc'][forms - 1])]}", name, "invalid_value")
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if first["type"] == "missing":
        return Refusal(400, f"{name}: missing; it must be given", name, "missing_required_parameter")
    return Refusal(400, f"{name or 'body'}: {first['msg']}", name or None, "invalid_value")

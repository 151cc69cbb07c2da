"""The bodies of requests: what of OpenAI's protocol is taken, and what is refused.

Each parameter of the protocol has one of three fates. It does something; or it can have no influence on the text and is
ignored (`IGNORED`); or it would have one that this server does not have, and is taken with its neutral value alone
(`NEUTRAL`). A parameter that the protocol does not know is refused, as OpenAI does.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sparsepack.option import LARGEST_COUNT
from sparsepack.serve.refusals import Refusal

IGNORED = frozenset(
    (
        *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    )
)
"""These parameters say nothing about the text."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "logit_bias": ({},),
        "logprobs": (False,),
        "modalities": (["text"],),
        "n": (1,),
        "presence_penalty": (0,),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
"""These parameters are taken with these values, or null, alone."""

MOST_STOPS = 4
"""A request has at most this many stop strings, as many as OpenAI takes."""

LONGEST_STOP = 1000
"""A stop string has at most this many characters: as much text is held back from a stream."""

R = TypeVar("R", bound="TextParameters")
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """What a request says of its stream.

    include_usage       -- a last event tells how many tokens there were
    include_obfuscation -- the field is ignored, because it says nothing about the text
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None


class TextParameters(BaseModel):
    """What both ways of asking for a text share. `top_k` is not in OpenAI's protocol, but in most servers of it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    max_tokens: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, accepted in NEUTRAL.items():
            value = body.get(name)
            if value is not None and not any(value == other for other in accepted):
                values = " or ".join(json.dumps(other) for other in accepted)
                remedy = f"; leave it out{f' or give {values}' if accepted else ''}"
                raise PydanticCustomError("unsupported", "{name}: not supported by this server{remedy}", locals())
        return {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "TextParameters":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "stream_options: only with stream: true", {"name": "stream_options"}
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(TextParameters):
    """The body of POST /v1/completions.

    prompt     -- a text, before which BOS goes where the model has one; or tokens, taken as they are. A list of one
                  text or of one list of tokens is that one.
    max_tokens -- 16 unless given, as at OpenAI
    """

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=1)]
    ) = ""

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt, taken out of a list of one."""
        first = self.prompt if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt[0]
        return first  # type: ignore[return-value]

    @property
    def most_tokens(self) -> int | None:
        """How many tokens are asked for at most."""
        return 16 if self.max_tokens is None else self.max_tokens


class ContentPart(BaseModel):
    """A part of a message; only text is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. `developer` is today's word for `system`; `name` is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(TextParameters):
    """The body of POST /v1/chat/completions; without a number of tokens the answer ends where the model ends it, or
    where the context is full."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    @model_validator(mode="after")
    def _one_number_of_tokens(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "max_tokens and max_completion_tokens: give one of them"
            raise PydanticCustomError("unsupported", message, {"name": "max_completion_tokens"})  # type: ignore[arg-type]
        return self

    @property
    def most_tokens(self) -> int | None:
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
    "stop": f"expected a text, or at most {MOST_STOPS} of them, each of 1 to {LONGEST_STOP} characters",
    "content": "expected a text, or a list of parts of type text",
}
"""These parameters may have several forms, of which the library would tell what the first one lacks."""


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "unsupported":
        return Refusal(400, first["msg"], first["ctx"]["name"], "unsupported_value")
    forms = next((n for n, part in enumerate(first["loc"], 1) if part in _EXPECTED), None)
    name = ".".join(str(part) for part in first["loc"][:forms])
    if forms:
        return Refusal(400, f"{name}: {_EXPECTED[str(first['loc'][forms - 1])]}", name, "invalid_value")
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if first["type"] == "missing":
        return Refusal(400, f"{name}: missing; it must be given", name, "missing_required_parameter")
    return Refusal(400, f"{name or 'body'}: {first['msg']}", name or None, "invalid_value")

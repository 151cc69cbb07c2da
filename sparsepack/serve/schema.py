"""The bodies of requests: parameters of OpenAI's protocol, and those that most of its servers add.

Each parameter has one of three fates. It does something; or it can have no influence on the text and is ignored
(`IGNORED`); or it would have one that this server does not have, and is taken with its neutral value alone
(`runtime.options.NEUTRAL`).
Other names and forms of a value become the one that stands here in `liberal`. A field that is not known is ignored, and
named once in the log; `strict` refuses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from sparsepack.option import LARGEST_COUNT
from sparsepack.runtime.generation.sampling import LARGEST_PENALTY
from sparsepack.runtime.options import NEUTRAL
from sparsepack.serve.liberal import check_neutral, check_strict, say_ignored, standard_form, unsupported
from sparsepack.serve.messages import CONTENT, ChosenTool, Message, Part, Tool
from sparsepack.serve.refusals import Refusal

IGNORED = frozenset(
    (
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user", "verbosity", "cache_prompt"),
    )
)
"""These parameters say nothing about the text."""

MOST_PARAMETERS = 100

MOST_CHOICES = 16
"""A request asks for at most this many texts after one prompt."""

LONGEST_GRAMMAR = 2**14
"""A grammar has at most this many characters."""

MAX_BIASES = 1024
"""A request changes the logits of at most this many tokens."""

MAX_PROMPTS = 256
"""A request has at most this many prompts."""

MAX_STOPS = 64
"""A request has at most this many stop strings, and this many stop tokens."""

MAX_STOP_LENGTH = 1000
"""A stop string has at most this many characters: as much text is held back from a stream."""

R = TypeVar("R", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Limit = Annotated[int, Field(ge=-2)]
"""A number of tokens; below 0 there is no limit but the context."""
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Part):
    """What a request says of its stream.

    include_usage          -- a last event has the numbers of tokens
    continuous_usage_stats -- each event has those until then (vLLM)
    include_obfuscation    -- the field is ignored, because it says nothing about the text
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Part):
    """The schema that a text keeps to. `strict` is ignored: every text keeps to it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Part):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise unsupported("json_schema", "it goes with the type json_schema, and with no other")
        return self


class TextParameters(BaseModel, ABC):
    """What both ways of asking for a text share. `liberal` has the other names and forms of a value. From `top_k` on
    parameters are not in OpenAI's protocol, but in llama.cpp or vLLM.

    repeat_last_n  -- how many of the last tokens the repeat penalty is of; -1: all, as `repetition_penalty` of
                      transformers and vLLM has it
    stop_token_ids -- tokens that end the text, besides those of the model
    ignore_eos     -- let the model's own do so no more
    min_tokens     -- before so many tokens none ends the text
    regex          -- a regular expression that the whole text matches
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    clips_max_tokens: ClassVar[bool] = False
    """Whether tokens that the context has no room for are left out, or refused."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)] | None = None
    presence_penalty: Annotated[float, Field(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=LONGEST_GRAMMAR)] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=LONGEST_GRAMMAR)] | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None  # vLLM's: no prefix is shared beyond it

    @model_validator(mode="before")
    @classmethod
    def _standard_form(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_PARAMETERS:
            raise unsupported("body", f"{len(body):,} parameters; the protocol has fewer than {MOST_PARAMETERS}")
        check_neutral(body, NEUTRAL)
        if info.context is STRICT:
            check_strict(body)
        return standard_form(
            {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}
        )

    @model_validator(mode="after")
    def _check_formats(self) -> "TextParameters":
        formats = {"grammar": self.grammar, "regex": self.regex, "response_format": self.requires_json or None}
        if len(given := [name for name, value in formats.items() if value is not None]) > 1:
            raise unsupported(given[0], f"not with {given[-1]}; give one of them")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def requires_json(self) -> bool:
        """Whether the response format asks for JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    @abstractmethod
    def logprobs_count(self) -> int | None:
        """How many of the likeliest tokens the answer names in each place; None: no log-probabilities."""

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens to generate; None: as many as there is room for."""
        return _limit(self.max_tokens)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


STRICT = object()
"""The context of validation in which what OpenAI refuses is refused."""


def _limit(tokens: int | None) -> int | None:
    return None if tokens is None or tokens < 0 else tokens


def _form_of_prompt(prompt: Any) -> str:
    """Which of its forms a prompt must have: only that one is tried, since a try looks at every element."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


class CompletionRequest(TextParameters):
    """The body of POST /v1/completions.

    prompt     -- a text, before which BOS goes where the model has one; or tokens, taken as they are; or a list of
                  texts or of lists of tokens, each of which is continued
    max_tokens -- 16 unless given, as at OpenAI
    logprobs   -- how many of the likeliest tokens the answer names in each place
    echo       -- begin the answer with the prompt; with `logprobs`, give the log-probabilities of its tokens, too
    """

    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists")],
        Discriminator(_form_of_prompt),
    ] = ""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which there is at least one."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item, arg-type]

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens to generate; None: as many as there is room for."""
        return 16 if self.max_tokens is None else _limit(self.max_tokens)

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs


class ChatRequest(TextParameters):
    """The body of POST /v1/chat/completions; without a number of tokens the answer ends where the model ends it, or
    where the context is full.

    continue_final_message -- go on within the last message; unless given, where it is the assistant's
    add_generation_prompt  -- false: go on behind the conversation, without the template's beginning of an answer
    chat_template_kwargs   -- further variables of the chat template
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_tools_and_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "only with logprobs: true")
        if self.requires_tool_call and (self.grammar is not None or self.regex is not None or self.requires_json):
            raise unsupported("tool_choice", "a call that must be made keeps to no other format; leave one out")
        names = [tool.function.name for tool in self.tools or ()]
        if names and isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise unsupported("tool_choice", f"{self.tool_choice.function.name!r} is none of the tools")
        return self

    @property
    def continues_message(self) -> bool:
        """Whether the answer goes on within the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return last.role == "assistant" and bool(last.text) and not last.tool_calls

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template; an effort of `none` switches the reasoning off."""
        effort = self.reasoning_effort
        given = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort} if effort else {}
        return {**given, **(self.chat_template_kwargs or {})}

    @property
    def requires_tool_call(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and (self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool))

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
        """The most tokens to generate; None: as many as there is room for."""
        return _limit(self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens)


EXPECTED = MappingProxyType(
    {
        "prompt": f"expected a text, token ids, or a list of at most {MAX_PROMPTS} texts or lists of token ids",
        "stop": f"expected a text, or at most {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} characters",
        "content": CONTENT,
        "logit_bias": f'expected {{"TOKEN ID": BIAS, ...}}, at most {MAX_BIASES:,} of them, each bias from -100 to 100',
        "tool_choice": 'expected "none", "auto", "required", or {"type": "function", "function": {"name": NAME}}',
    }
)
"""These parameters may have several forms, of which pydantic would name the first one alone."""


def read_request(kind: type[R], body: bytes, strict: bool = False, expected: Mapping[str, str] = EXPECTED) -> R:
    """A request from its body. Raises `Refusal` 400, naming the first parameter that is wrong.

    strict   -- refuse fields that are not known, and values that OpenAI does not take
    expected -- what is said of a wrong value of these parameters, or of one within it
    """
    try:
        try:
            return kind.model_validate_json(body, context=STRICT if strict else None)
        except ValidationError as error:
            unknown = [one["loc"] for one in error.errors(include_url=False) if one["type"] == "extra_forbidden"]
            if strict or not unknown:
                raise
            extra = kind.model_config.get("extra")
            request = kind.model_validate_json(body, extra="ignore" if extra == "forbid" else extra)
            say_ignored(unknown)
            return request
    except ValidationError as error:
        raise _refusal(error, expected) from error


def _refusal(error: ValidationError, expected: Mapping[str, str]) -> Refusal:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "unsupported":
        name = ".".join(str(part) for part in (*first["loc"], first["ctx"]["name"]))
        return Refusal(400, f"{name}: {first['ctx']['reason']}", name, "unsupported_value")
    known = first["type"] != "extra_forbidden"
    forms = next((n for n, part in enumerate(first["loc"], 1) if known and part in expected), None)
    name = ".".join(str(part) for part in first["loc"][:forms])
    if forms:
        return Refusal(400, f"{name}: {expected[str(first['loc'][forms - 1])]}", name, "invalid_value")
    if not known:
        return Refusal(400, f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if first["type"] == "missing":
        return Refusal(400, f"{name}: missing; it must be given", name, "missing_required_parameter")
    return Refusal(400, f"{name or 'body'}: {first['msg']}", name or None, "invalid_value")

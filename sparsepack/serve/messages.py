"""Messages and tools of a chat, as requests have them and as chat templates take them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sparsepack.serve.guards import MAX_JSON_VALUES, check_values
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

"""The messages and the tools of a chat, as requests have them and as chat templates take them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparsepack.serve.guards import MAX_JSON_VALUES, check_values
from sparsepack.serve.liberal import unsupported
from sparsepack.serve.tool_formats import JSON_DECODER

CONTENT = "expected a text, or a list of parts of type text; this server reads no images, no audio and no files"


class Part(BaseModel):
    """A body of a request, or a part of one, which is read once and stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ContentPart(Part):
    """A part of a message; only text is taken, by the names that OpenAI's protocols have for it, or without one."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, part: Any) -> Any:
        return {"text": part} if isinstance(part, str) else part


class CalledFunction(Part):
    """A function that the model called, with its arguments in JSON; an empty text stands for none."""

    name: str
    arguments: str = ""

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates take it: they write the arguments themselves."""
        return {"name": self.name, "arguments": JSON_DECODER.decode(self.arguments or "{}")}

    @model_validator(mode="before")
    @classmethod
    def _dump_arguments(cls, function: Any) -> Any:
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments", ""), dict | None):
            return {**function, "arguments": json.dumps(arguments or {})}
        return function

    @model_validator(mode="after")
    def _check_arguments(self) -> "CalledFunction":
        check_values(self.arguments.encode(), MAX_JSON_VALUES)
        try:
            read = JSON_DECODER.decode(self.arguments or "{}")
            json.dumps(read, ensure_ascii=False).encode()  # no half of a character of UTF-16, which no tokenizer takes
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise unsupported("arguments", "expected a JSON object, as text")
        return self


class CalledTool(Part):
    """A call in an answer that the client sends back."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Part):
    """A message of a chat. `developer` is today's word for `system`, `function` an old one for `tool`. A message of the
    role `tool` is what a call gave. `name` is ignored but there."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _standard_form(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        message = {name: value for name, value in message.items() if value is not None}
        if isinstance(content := message.get("content"), list):
            message["content"] = [part for part in content if part is not None]
        if (call := message.pop("function_call", None)) is not None:
            message.setdefault("tool_calls", [{"function": call}])
        if (reasoning := message.pop("reasoning", None)) is not None:
            message.setdefault("reasoning_content", reasoning)
        return message

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise unsupported("tool_calls", "only in messages of the role assistant")
        return self

    @property
    def text(self) -> str:
        """The content as one text; none is empty."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or f"call_{n}", "type": "function", "function": call.function.for_template()}
                for n, call in enumerate(self.tool_calls)
            ]
        if role == "tool":
            named = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {name: value for name, value in named.items() if value is not None}
        return message


class Function(Part):
    """A function that the model may call. `strict` is ignored."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> "Function":
        if (kind := (self.parameters or {}).get("type", "object")) != "object":
            raise unsupported("parameters", f'type {json.dumps(kind)[:60]}: expected a schema of type "object"')
        return self


class Tool(Part):
    """A tool; functions are the only ones."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nest_function(cls, tool: Any) -> Any:
        """OpenAI's Responses have a function's name next to the type."""
        if isinstance(tool, dict) and "name" in tool and "function" not in tool:
            function = {name: value for name, value in tool.items() if name != "type"}
            return {"type": tool.get("type", "function"), "function": function}
        return tool

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": {"description": "", "parameters": {}, **function}}


class FunctionName(Part):
    """The name of a function."""

    name: str


class ChosenTool(Part):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName

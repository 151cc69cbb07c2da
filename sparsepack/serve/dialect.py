"""How one model's chat template and answers have tools and reasoning: from messages to a prompt, and from an answer to
its parts."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.chat import writes_role
from sparsepack.serve.liberal import Json
from sparsepack.serve.reasoning import THINK, Reasoning, ReasoningParser, reasoning_format
from sparsepack.serve.tool_formats import HERMES, Functions, generic_messages, tool_format
from sparsepack.serve.tools import AnswerParser, PlainTextParser, ToolCallParser

_NEEDLE = "needle"
_LOOKUP = {"type": "function", "function": {"name": _NEEDLE, "description": _NEEDLE, "parameters": {}}}


class Dialect:
    """What all requests for one model share.

    tools  -- the form of its calls
    native -- whether its template writes the tools; else this server's own prompt does
    """

    def __init__(self, model: Model, reasoning: str = "auto") -> None:
        self._model, self._mode = model, reasoning
        self._template = model.template(with_tools=True) or ""
        known = tool_format(self._template)
        self.native = known is not None and self._takes_tools()
        self.tools = known if known is not None and self.native else HERMES
        self._reasoning = reasoning_format(self._template) or (THINK if reasoning == "split" else None)
        self._said = False

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json], variables: Json, **how: bool) -> str:
        """The text of a conversation up to where the answer begins. Raises `UserError`.

        variables -- further ones of the template; `enable_thinking` false ends the reasoning before it begins
        how       -- as `Model.chat_prompt` has it
        """
        variables = {**({"enable_thinking": False} if self._mode == "off" else {}), **variables}
        written = [self._with_reasoning(message) for message in messages]
        if not self.native and (tools or any("tool_calls" in each or each["role"] == "tool" for each in written)):
            special_tokens = self._model.packed.named_tokens(self._model.tokenizer)
            system = writes_role(self._model.template(with_tools=False) or "", "system", special_tokens)
            written, tools = generic_messages(written, tools, system), ()
            self._say_once()
        prompt = self._rendered(written, tools, variables, how)
        format = self._reasoning
        if format is not None and variables.get("enable_thinking") is False and prompt.rstrip().endswith(format.begin):
            prompt = f"{prompt.rstrip()}\n\n{format.end}\n\n"
        return prompt

    def reasoning(self, prompt: str, variables: Json) -> Reasoning | None:
        """What of the answer to a prompt may be reasoning; None: the template has no form of it.

        variables -- as in `prompt`
        """
        if self._reasoning is None:
            return None
        off = variables.get("enable_thinking", self._mode != "off") is False
        return Reasoning(self._reasoning, None) if off else Reasoning.of_prompt(self._reasoning, prompt)

    def parser(self, functions: Functions, most: int | None, reasoning: Reasoning | None) -> Callable[[], AnswerParser]:
        """What makes the parser of an answer; `most` as in `ToolCallParser`."""

        def answer() -> AnswerParser:
            return ToolCallParser(self.tools, functions, most) if functions else PlainTextParser()

        if reasoning is None or self._mode == "text":
            return answer
        return lambda: ReasoningParser(reasoning, answer())

    def preserved_tokens(self, with_tools: bool) -> tuple[int, ...]:
        """The special tokens in which an answer has its marks."""
        marks = (*(self._reasoning.marks if self._reasoning else ()), self.tools.marks if with_tools else "")
        added = self._model.tokenizer.get_added_tokens_decoder().items()
        return tuple(id for id, token in added if token.special and any(token.content in mark for mark in marks))

    def _takes_tools(self) -> bool:
        """Whether the template writes what tools there are."""
        try:
            return _NEEDLE in self._model.chat_prompt([{"role": "user", "content": "Hello"}], [_LOOKUP])
        except UserError:
            return False

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            lacks = "has no form of calls that is known here" if "tools" in self._template else "has no place for tools"
            message = "tools: the chat template %s; a system message of this server describes them"
            logging.getLogger(__name__).warning(message, lacks)

    def _with_reasoning(self, message: Json) -> dict[str, Any]:
        """A message with the reasoning under the name that the template reads."""
        written = dict(message)
        renamed = "reasoning_content" not in self._template and "thinking" in self._template
        if renamed and "reasoning_content" in written:
            reasoning = written.pop("reasoning_content")
            if not (written.get("tool_calls") and written["content"]):  # gpt-oss refuses both
                written["thinking"] = reasoning
        return written

    def _rendered(self, messages: list[dict[str, Any]], tools: Sequence[Json], variables: Json, how: Json) -> str:
        """The prompt. Some templates take a system message only at the beginning, or none: theirs are put together
        there, or before the first message of the user. Some write the arguments of calls from their text in JSON."""
        try:
            return self._model.chat_prompt(messages, tools, variables, **how)
        except UserError:
            in_json: list[Json] = [*map(_with_json_arguments, messages)]
            for others in (*_without_system_messages_between(messages), in_json):
                with suppress(UserError):
                    return self._model.chat_prompt(others, tools, variables, **how)
            raise


def _without_system_messages_between(messages: Sequence[Json]) -> Iterator[list[Json]]:
    """Conversations whose system messages stand together at the beginning, and in the first message of the user."""
    others = [message for message in messages if message["role"] != "system"]
    if not others or len(others) == len(messages):
        return
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system" and each["content"])
    yield [{"role": "system", "content": system}, *others]
    first = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
    if first is not None:
        others[first] = {**others[first], "content": "\n\n".join(filter(None, (system, others[first]["content"])))}
        yield others


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message

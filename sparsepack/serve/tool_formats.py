"""How models write calls of tools: a row for each form, and the form that a chat template has.

A row has the texts of one call and of what stands around several, in which `$NAME`, `$ARGUMENTS`, `$KEY`, `$NUMBER` and
`$ID` stand for what varies. Grammars are made of these texts, and answers are read by them; a reader takes any space
where a text has some.
"""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Functions = Mapping[str, Mapping[str, Any] | None]
"""The JSON schemas of arguments by the names of functions; None or empty: a function has none."""

Call = tuple[str, Any]
"""A function's name and its arguments, as they were read."""

VARIABLES = re.compile(r"\$(NAME|ARGUMENTS|KEY|NUMBER|ID)")
_READ = {"NAME": r"(?P<name>[\w.-]+)", "KEY": r"(?P<key>[^<>=\n]+?)", "NUMBER": r"\d+", "ID": r"\w+"}


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


JSON_DECODER = json.JSONDecoder(parse_constant=_no_json)
"""Reads JSON, without Python's additions NaN and Infinity."""


def _pattern(text: str) -> str:
    """A regular expression of a text, with any space where it has some."""
    parts = VARIABLES.split(text.strip())
    literals = (r"\s*".join(map(re.escape, re.split(r"\s+", part))) for part in parts[::2])
    return "".join(literal + _READ.get(name, "") for literal, name in zip(literals, [*parts[1::2], ""], strict=True))


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one.

    begin     -- before a value, with $KEY
    end       -- behind it
    separator -- between two
    raw       -- strings stand as they are; else as in JSON
    """

    begin: str
    end: str = ""
    separator: str = ""
    raw: bool = True


@dataclass(frozen=True)
class ToolFormat(ABC):
    """A form of calls.

    name      -- of the form
    template  -- a regular expression that chat templates of the form match
    call      -- one call, with $NAME and $ARGUMENTS
    begin     -- before the first call; end -- behind the last one; separator -- between two
    parameters -- how arguments are written; None: as a JSON object
    """

    name: str
    template: str
    call: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    parameters: Parameters | None = None

    @property
    def marks(self) -> str:
        """All texts of the form."""
        return self.begin + self.call + self.separator + self.end

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts with which calls begin; none: the whole answer is calls."""
        start = re.split(r"\s|\$|\{", self.begin or self.call)[0].rstrip("[")
        return (start,) if start else ()

    @property
    @abstractmethod
    def ends(self) -> tuple[str, ...]:
        """Texts with one of which a call becomes complete."""

    @abstractmethod
    def read(self, text: str, functions: Functions, final: bool) -> tuple[list[Call], int] | None:
        """The calls that a text begins with, and how many characters they take; None where there are none yet.

        final -- no more text comes: what stands behind the calls may be missing
        """


class ObjectFormat(ToolFormat):
    """A call is a JSON object with the function's name and arguments; several may be a JSON list."""

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What stands before the JSON and behind it."""
        before, _, rest = self.call.partition("{")
        behind = rest.rpartition("}")[2] + self.end
        return (self.begin + before).rstrip("[ \n"), behind.lstrip("] \n") or ("" if self.starts else self.separator)

    @property
    def ends(self) -> tuple[str, ...]:
        behind = self._around[1].strip()
        return (behind,) if behind else ("}", "]")

    def read(self, text: str, functions: Functions, final: bool) -> tuple[list[Call], int] | None:
        before, behind = map(_pattern, self._around)
        if (begun := re.compile(rf"\s*{before}\s*").match(text)) is None:
            return None
        try:
            value, at = JSON_DECODER.raw_decode(text, begun.end())
        except (ValueError, RecursionError):
            return None
        ended = re.compile(rf"\s*(?:{behind}|\Z)" if final else rf"\s*{behind}").match(text, at)
        if ended is None:
            return None
        each = value if isinstance(value, list) else [value]
        return [(_first(call, "name", "tool_name"), _arguments(call)) for call in each], ended.end()


@dataclass(frozen=True)
class NamedFormat(ToolFormat):
    """The function's name is part of the marks, and its arguments stand between them.

    head -- a regular expression of what stands before the arguments, where models vary it; with the group `name`
    heads -- then, what calls begin with
    """

    head: str = ""
    heads: tuple[str, ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        return self.heads or super().starts

    @property
    def ends(self) -> tuple[str, ...]:
        return (re.split(r"\s+", self.call.rpartition("$ARGUMENTS")[2].strip())[-1] or "}",)

    def read(self, text: str, functions: Functions, final: bool) -> tuple[list[Call], int] | None:
        head, _, tail = self.call.partition("$ARGUMENTS")
        around = "|".join(_pattern(mark) for mark in (self.begin, self.separator) if mark.strip())
        before = rf"(?:(?:{around})\s*)*" if around else ""  # each space in one way: nothing is tried for long
        begun = re.compile(rf"\s*{before}(?:{self.head or _pattern(head)})\s*").match(text)
        if begun is None:
            return None
        name = begun["name"]
        try:
            arguments, at = self._arguments(text, begun.end(), functions.get(name))
        except (ValueError, RecursionError):
            return None
        behind = _pattern(tail)
        ended = re.compile(rf"\s*(?:{behind}|\Z)" if final else rf"\s*{behind}").match(text, at)
        if ended is None:
            return None
        closed = re.compile(rf"(?:\s*{_pattern(self.end)})?").match(text, ended.end())
        return [(name, arguments)], ended.end() if closed is None else closed.end()

    def _arguments(self, text: str, at: int, schema: Mapping[str, Any] | None) -> tuple[Any, int]:
        if self.parameters is None:
            return JSON_DECODER.raw_decode(text, at)
        pattern = rf"\s*{_pattern(self.parameters.begin)}\n?(?P<value>(?s:.*?))\n?{_pattern(self.parameters.end)}"
        properties = (schema or {}).get("properties")
        arguments = {}
        while (found := re.compile(pattern).match(text, at)) is not None:
            expected = properties.get(found["key"]) if isinstance(properties, Mapping) else None
            is_text = isinstance(expected, Mapping) and expected.get("type") == "string"
            arguments[found["key"]] = found["value"] if is_text else _json_or_text(found["value"])
            at = found.end()
        return arguments, at


class PythonFormat(ToolFormat):
    """Calls are written as in Python, with arguments by name."""

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end.strip(),)

    def read(self, text: str, functions: Functions, final: bool) -> tuple[list[Call], int] | None:
        begun = re.compile(rf"\s*{_pattern(self.begin)}").match(text)
        if begun is None:
            return None
        ended = re.compile(_pattern(self.end)).search(text, begun.end())
        if ended is None and not final:
            return None
        written = text[begun.end() : None if ended is None else ended.start()]
        try:
            body = ast.parse(written.strip().removesuffix("]") if ended is None else written.strip()).body
            calls = [_python_call(node) for statement in body for node in _expressions(statement)]
            json.dumps([arguments for _, arguments in calls], allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
        return calls, len(text) if ended is None else ended.end()


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("no call")
    return statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's true, false and null for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id]) if node.id in _NAMES else node


_NAMES = ("true", "false", "null")


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with arguments by name")
    values = {each.arg: ast.literal_eval(_JsonNames().visit(each.value)) for each in node.keywords}
    return ast.unparse(node.func), values


def _first(call: Any, *keys: str) -> Any:
    return next((call[key] for key in keys if key in call), None) if isinstance(call, dict) else None


def _arguments(call: Any) -> Any:
    found = _first(call, "arguments", "parameters")
    return {} if found is None else found


def _json_or_text(value: str) -> Any:
    try:
        return JSON_DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


OBJECT = '{"name": "$NAME", "arguments": $ARGUMENTS}'

HERMES = ObjectFormat("hermes", "<tool_call>", f"<tool_call>\n{OBJECT}\n</tool_call>", separator="\n")
"""Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4, EXAONE 4, ERNIE 4.5; and the form of models without one."""

LLAMA = ObjectFormat(
    "llama", r'(?s)"name".*"parameters"\s*:', '{"name": "$NAME", "parameters": $ARGUMENTS}', separator="; "
)
"""Llama 3: the answer is one object or several."""

FORMATS: tuple[ToolFormat, ...] = (
    NamedFormat(
        "qwen3-coder",  # also Qwen 3.5, Nemotron 3
        "<function=example_function_name>(?s:.*)</tool_call>",
        "<tool_call>\n<function=$NAME>\n$ARGUMENTS</function>\n</tool_call>",
        separator="\n",
        parameters=Parameters("<parameter=$KEY>\n", "\n</parameter>\n"),
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[\w.-]+)>",
        heads=("<tool_call>", "<function="),
    ),
    NamedFormat(
        "seed-oss",
        "<seed:tool_call>",
        "<seed:tool_call>\n<function=$NAME>\n$ARGUMENTS</function>\n</seed:tool_call>",
        separator="\n",
        parameters=Parameters("<parameter=$KEY>", "</parameter>\n"),
    ),
    NamedFormat(
        "glm",  # 4.5 and later
        "<arg_key>",
        "<tool_call>$NAME\n$ARGUMENTS</tool_call>",
        separator="\n",
        parameters=Parameters("<arg_key>$KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    NamedFormat(
        "gpt-oss",
        r"<\|channel\|>commentary",
        "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGUMENTS<|call|>",
        head=r"(?:<\|channel\|>commentary\s*)?to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>",
        heads=("<|channel|>commentary to=functions.", "to=functions."),
    ),
    NamedFormat(
        "deepseek-r1",
        r"<｜tool▁sep｜>'\s*\+\s*tool\['function'\]\['name'\]",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$ARGUMENTS\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    NamedFormat(
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGUMENTS<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    NamedFormat("mistral-args", r"\[ARGS\]", "[TOOL_CALLS]$NAME[ARGS]$ARGUMENTS"),  # Devstral, Magistral, Ministral 3
    ObjectFormat(
        "mistral",
        r"\[TOOL_CALLS\]",
        '{"name": "$NAME", "arguments": $ARGUMENTS, "id": "$ID"}',
        begin="[TOOL_CALLS] [",
        separator=", ",
        end="]",
    ),
    NamedFormat(
        "apertus",
        r"<\|tools_prefix\|>",
        '{"$NAME": $ARGUMENTS}',
        begin="<|tools_prefix|>[",
        separator=", ",
        end="]<|tools_suffix|>",
    ),
    ObjectFormat("nemotron", "<TOOLCALL>", OBJECT, begin="<TOOLCALL>[", separator=", ", end="]</TOOLCALL>"),
    ObjectFormat(
        "cohere",
        r"<\|START_ACTION\|>",
        '    {"tool_call_id": "$NUMBER", "tool_name": "$NAME", "parameters": $ARGUMENTS}',
        begin="<|START_ACTION|>[\n",
        separator=",\n",
        end="\n]<|END_ACTION|>",
    ),
    ObjectFormat("granite", r"<\|tool_call\|>", OBJECT, begin="<|tool_call|>[", separator=", ", end="]"),  # 3
    PythonFormat(
        "lfm2",
        r"<\|tool_(list|call)_start\|>",
        "$NAME($ARGUMENTS)",
        begin="<|tool_call_start|>[",
        separator=", ",
        end="]<|tool_call_end|>",
        parameters=Parameters("$KEY=", separator=", ", raw=False),
    ),
    PythonFormat(
        "olmo3",
        "<function_calls>",
        "$NAME($ARGUMENTS)",
        begin="<function_calls>\n",
        separator="\n",
        end="\n</function_calls>",
        parameters=Parameters("$KEY=", separator=", ", raw=False),
    ),
    HERMES,
    LLAMA,
)
"""The first row that matches a template is its form."""


def tool_format(template: str) -> ToolFormat | None:
    """The form of a chat template; None: one that has no row."""
    return next((format for format in FORMATS if re.search(format.template, template)), None)


def generic_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of tools where the template has no place for them; it asks for calls in the form of Hermes."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = VARIABLES.sub(lambda found: found[1], HERMES.call)
    return (
        "You can call these functions. Each line has a name, a description and a JSON schema of the arguments:\n"
        f"{functions}\n\n"
        "To call a function, write its name and its arguments, a JSON object, in this form and nothing behind it:\n"
        f"{form}\n"
        "The result follows in the next message. Where no function helps, answer without a call."
    )


def generic_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system: bool
) -> list[dict[str, Any]]:
    """A conversation with calls and their results for a template that has no place for them.

    system -- whether the template has a place for a system message; else what it would say begins the user's first one
    """
    written: list[dict[str, Any]] = []
    for each_message in messages:
        message = dict(each_message)
        if calls := message.pop("tool_calls", None):
            each = [
                HERMES.call.replace("$NAME", call["function"]["name"]).replace(
                    "$ARGUMENTS", json.dumps(call["function"]["arguments"], ensure_ascii=False)
                )
                for call in calls
            ]
            message["content"] = "\n".join([text for text in (message["content"],) if text] + each)
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        last = written[-1] if written else {}
        if message["role"] == last.get("role") == "user" and last["content"].endswith("</tool_response>"):
            last["content"] += f"\n{message['content']}"
        else:
            written.append(message)
    first = [generic_prompt(tools)] if tools else []
    if system and first and written[0]["role"] == "system":
        first.insert(0, written.pop(0)["content"])
    elif not system:
        first = [message["content"] for message in written if message["role"] == "system"] + first
        written = [message for message in written if message["role"] != "system"]
        if first and written and written[0]["role"] == "user":
            first.append(written.pop(0)["content"])
    content = "\n\n".join(filter(None, first))
    return [{"role": "system" if system else "user", "content": content}, *written] if first else written

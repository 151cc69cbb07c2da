"""Calls of tools in answers, in whatever pieces they come."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.serve.reasoning import FORMATS as REASONING_FORMATS
from sparsepack.serve.reasoning import THINK, Reasoning, ReasoningParser, reasoning_format
from sparsepack.serve.tool_formats import FORMATS, HERMES, LLAMA, ToolFormat, generic_messages, tool_format
from sparsepack.serve.tools import ParsedText, PlainTextParser, ToolCallParser

CALL = '{"name": "f", "arguments": {"a": "</tool_call> {"}}'


FUNCTIONS: Any = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}, "g": None}


def read(format: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, object]]]:
    """The text of an answer and its calls."""
    told = in_pieces(format, *pieces)
    calls = [call for parsed in told for call in parsed.calls]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(parsed.text for parsed in told), [(call.name, json.loads(call.arguments)) for call in calls]


def in_pieces(format: ToolFormat, *pieces: str) -> list[ParsedText]:
    """What is told after each piece, and at the end."""
    reader = ToolCallParser(format, FUNCTIONS)
    return [*map(reader.push, pieces), reader.finish()]


HERMES_ANSWERS = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", {"a": "</tool_call> {"})]),
    ('Well.\n<tool_call>{"name": "g"}</tool_call>', "Well.\n", [("g", {})]),
    (f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "g", "arguments": {{}}}}', "", ["f", "g"]),
]
HERMES_TEXTS = [
    "No call <tool here.",
    "<tool_call>\n{broken\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {"a',
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": []}\n</tool_call>',
    "<tool_call>" + "[" * 100_000,
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": {}, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}} and</tool_call>',
]


@pytest.mark.parametrize(("answer", "text", "calls"), HERMES_ANSWERS)
def test_calls_between_marks_are_read_and_the_text_before_them_is_told(
    answer: str, text: str, calls: list[object]
) -> None:
    for pieces in ([answer], list(answer)):
        found, made = read(HERMES, *pieces)
        assert found == text
        assert made == calls or [name for name, _ in made] == calls


@pytest.mark.parametrize("answer", HERMES_TEXTS, ids=lambda answer: answer[:20])
def test_what_is_no_call_between_marks_is_text(answer: str) -> None:
    assert read(HERMES, *answer) == (answer, [])


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', ["f"]),
        ('\n {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n', ["f", "g"]),
    ],
)
def test_an_answer_that_is_an_object_is_a_call(answer: str, names: list[str]) -> None:
    text, calls = read(LLAMA, *answer)
    assert (text, [name for name, _ in calls]) == ("", names)


@pytest.mark.parametrize("answer", ["Hello {", '{"name": "x"}', '{"a": 1}', '{"name": "f"} and', "{", ""])
def test_another_answer_is_text(answer: str) -> None:
    assert read(LLAMA, *answer) == (answer, [])


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (HERMES, f'Well. <tool_call>{CALL}</tool_call>|\n<tool_call>{{"name": "g"}}</tool_call>|\n'),
        (LLAMA, '{"name": "f", "parameters": {"a": "; {"}};| {"name": "g", "parameters": {}};|\n'),
    ],
    ids=["hermes", "llama"],
)
def test_each_call_is_told_when_it_is_complete(format: ToolFormat, answer: str) -> None:
    told = in_pieces(format, *answer.split("|"))
    assert [[call.name for call in parsed.calls] for parsed in told] == [["f"], ["g"], [], []]
    by_character = in_pieces(format, *answer.replace("|", ""))
    assert [call.name for parsed in by_character[:-1] for call in parsed.calls] == ["f", "g"]
    assert "".join(parsed.text for parsed in by_character) == ("Well. " if format is HERMES else "")


def test_what_comes_after_a_call_and_is_none_is_text() -> None:
    call, other = '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "x"}</tool_call> {"name": "g"}'
    for pieces in ([call + other], [*(call + other)]):
        assert read(HERMES, *pieces) == (other, [("f", {})])
    assert read(HERMES, f"{call} Done.") == (" Done.", [("f", {})])


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (HERMES, f'Well. <tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call> Done.'),
        (LLAMA, '{"name": "f", "parameters": {"a": "; {"}}; {"name": "g", "parameters": {}}; Done.'),
    ],
    ids=["hermes", "llama"],
)
def test_of_several_calls_those_that_may_be_told_are_told(format: ToolFormat, answer: str) -> None:
    for pieces in ([answer], [*answer]):
        reader = ToolCallParser(format, FUNCTIONS, most=1)
        told = [*map(reader.push, pieces), reader.finish()]
        assert [call.name for parsed in told for call in parsed.calls] == ["f"]
        assert "".join(parsed.text for parsed in told) == ("Well.  Done." if format is HERMES else " Done.")


def test_arguments_have_only_characters_that_have_utf_8() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": "Z\u00fcrich"}}</tool_call>'
    (call,) = in_pieces(HERMES, answer)[0].calls
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800", "b": "Z\u00fcrich"}


@given(st.lists(st.sampled_from(["<tool", "_call>", "</tool_call>", '{"name": "f"}', "{", " ", "x"]), max_size=8))
def test_without_calls_the_text_is_whole(pieces: list[str]) -> None:
    for format in (HERMES, LLAMA):
        text, calls = read(format, *pieces)
        assert calls or text == "".join(pieces)


def test_the_format_is_the_template_s() -> None:
    assert tool_format("{{ tools }}<tool_call>") is HERMES
    assert tool_format('{"name": function name, "parameters": dictionary}') is LLAMA
    assert tool_format("<tool_call>\n<function=example_function_name>\n</function>\n</tool_call>") is FORMATS[0]
    assert tool_format("{% for tool in tools %}{{ tool }}{% endfor %}") is None


ANSWERS = {
    "qwen3-coder": """<tool_call>
<function=f>
<parameter=s>
two
lines
</parameter>
<parameter=n>
1
</parameter>
</function>
</tool_call>
<tool_call>
<function=g>
</function>
</tool_call>""",
    "seed-oss": "<seed:tool_call>\n<function=f>\n<parameter=s>two\nlines</parameter>\n<parameter=n>1</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>two\nlines</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "two\\nlines", "n": 1}<|call|>'
    "to=functions.g<|channel|>commentary json<|message|>{}",
    "deepseek-r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"s": "two\\nlines", "n": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "two\\nlines", "n": 1}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral-args": '[TOOL_CALLS]f[ARGS]{"s": "two\\nlines", "n": 1}[TOOL_CALLS]g[ARGS]{}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"s": "two\\nlines", "n": 1}, "id": "VvvODy9mT"}, '
    '{"name": "g", "arguments": {}}]',
    "apertus": '<|tools_prefix|>[{"f": {"s": "two\\nlines", "n": 1}}, {"g": {}}]<|tools_suffix|>',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"s": "two\\nlines", "n": 1}}, {"name": "g", "arguments": {}}]'
    "</TOOLCALL>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
    '{"s": "two\\nlines", "n": 1}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"s": "two\\nlines", "n": 1}}, {"name": "g"}]',
    "lfm2": "<|tool_call_start|>[f(s='two\\nlines', n=1), g()]<|tool_call_end|>",
    "olmo3": '<function_calls>\nf(s="two\\nlines", n=1)\ng()\n</function_calls>',
    "hermes": '<tool_call>\n{"arguments": {"s": "two\\nlines", "n": 1}, "name": "f"}\n</tool_call>\n<tool_call>\n'
    '{"name": "g", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "f", "parameters": {"s": "two\\nlines", "n": 1}}; {"name": "g", "parameters": {}}',
}


@pytest.mark.parametrize("name", [format.name for format in FORMATS])
def test_every_form_is_read_as_models_write_it(name: str) -> None:
    format = next(each for each in FORMATS if each.name == name)
    before = "Well. " if format.starts else ""
    answer = before + ANSWERS[name]
    for pieces in ([answer], [*answer]):
        assert read(format, *pieces) == (before, [("f", {"s": "two\nlines", "n": 1}), ("g", {})])


@pytest.mark.parametrize("written", ["import os", "f(1)", "f(s=open('x'))", "f(s=1)+1", "f(s={1})", "x(s=1)"])
def test_what_is_no_call_in_python_is_text(written: str) -> None:
    lfm2 = next(format for format in FORMATS if format.name == "lfm2")
    answer = f"<|tool_call_start|>[{written}]<|tool_call_end|>"
    assert read(lfm2, answer) == (answer, [])


def parts(reasoning: Reasoning, answer: str) -> set[tuple[str, str]]:
    """The reasoning and the text of an answer in one piece, and in pieces of a character."""
    found = set()
    for pieces in ([answer], [*answer]):
        reader = ReasoningParser(reasoning, PlainTextParser())
        told = sum((*map(reader.push, pieces), reader.finish()), ParsedText())
        found.add((told.reasoning, told.text))
    return found


@pytest.mark.parametrize(
    ("open", "answer", "reasoning", "text"),
    [
        (False, "<think>\nSo </th.\n\n</think>\n\nHello <think> you.\n", "So </th.", "Hello <think> you.\n"),
        (True, "So.\n</think>\nHello", "So.", "Hello"),
        (True, "So", "So", ""),
        (False, " Hello </think>", "", " Hello </think>"),
        (None, "Hello", "", "Hello"),
        (False, "<think>\n\n</think>\n\nHello", "", "Hello"),
    ],
)
def test_reasoning_is_told_from_the_answer(open: bool | None, answer: str, reasoning: str, text: str) -> None:
    assert parts(Reasoning(THINK, open), answer) == {(reasoning, text)}


def test_channels_are_told_apart() -> None:
    answer = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    assert parts(Reasoning(REASONING_FORMATS[0], False), answer) == {("So.", "Hello")}
    assert parts(Reasoning(REASONING_FORMATS[0], False), "<|channel|>final<|message|>Hello") == {("", "Hello")}


def test_the_prompt_says_whether_the_answer_begins_within_the_reasoning() -> None:
    assert Reasoning.of_prompt(THINK, "assistant\n<think>\n").open is True
    assert Reasoning.of_prompt(THINK, "assistant\n<think>\n\n</think>\n\n").open is None
    assert Reasoning.of_prompt(THINK, "assistant\n").open is False
    assert reasoning_format("{{ content.split('</think>')[-1] }}") is THINK
    assert reasoning_format("{{ content }}") is None


def test_a_template_without_tools_gets_them_as_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "user", "content": "And?"},
    ]
    system, user, assistant, results = generic_messages(messages, [tool], system=True)
    assert (system["role"], user) == ("system", messages[0])
    assert '"name": "f", "description": "does it"' in system["content"]
    assert read(HERMES, assistant["content"]) == ("", [("f", {"a": 1})])
    assert results["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nAnd?"
    merged = generic_messages([{"role": "system", "content": "Be brief."}, *messages], [tool], system=False)
    assert merged == [{"role": "user", "content": f"Be brief.\n\n{system['content']}\n\nHello"}, assistant, results]

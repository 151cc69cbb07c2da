"""Calls of tools in answers, in whatever pieces they come."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.serve.tools import HERMES, LLAMA, CallReader, ToolFormat, takes_tools, tool_format

CALL = '{"name": "f", "arguments": {"a": "</tool_call> {"}}'


def read(format: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, object]]]:
    """The text of an answer and its calls."""
    reader = CallReader(format, {"f", "g"})
    text = "".join(map(reader.push, pieces))
    rest, calls = reader.finish()
    assert len({call.id for call in calls}) == len(calls)
    return text + rest, [(call.name, json.loads(call.arguments)) for call in calls]


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


@given(st.lists(st.sampled_from(["<tool", "_call>", "</tool_call>", '{"name": "f"}', "{", " ", "x"]), max_size=8))
def test_without_calls_the_text_is_whole(pieces: list[str]) -> None:
    for format in (HERMES, LLAMA):
        text, calls = read(format, *pieces)
        assert calls or text == "".join(pieces)


def test_the_format_is_the_template_s() -> None:
    assert tool_format("{{ tools }}<tool_call>") is HERMES
    assert tool_format('{"name": function name, "parameters": dictionary}') is LLAMA
    assert tool_format("{% for tool in tools %}{{ tool }}{% endfor %}") is None
    assert takes_tools("{% if tools %}")
    assert not takes_tools("{{ m.toolset }}")

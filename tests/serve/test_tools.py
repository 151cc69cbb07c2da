"""Calls of tools in answers, in whatever pieces they come."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.serve.tools import HERMES, LLAMA, ParsedText, ToolCallParser, ToolFormat, takes_tools, tool_format

CALL = '{"name": "f", "arguments": {"a": "</tool_call> {"}}'


def read(format: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, object]]]:
    """The text of an answer and its calls."""
    told = in_pieces(format, *pieces)
    calls = [call for parsed in told for call in parsed.calls]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(parsed.text for parsed in told), [(call.name, json.loads(call.arguments)) for call in calls]


def in_pieces(format: ToolFormat, *pieces: str) -> list[ParsedText]:
    """What is told after each piece, and at the end."""
    reader = ToolCallParser(format, {"f", "g"})
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
        reader = ToolCallParser(format, {"f", "g"}, most=1)
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
    assert tool_format("{% for tool in tools %}{{ tool }}{% endfor %}") is None
    assert takes_tools("{% if tools %}")
    assert not takes_tools("{{ m.toolset }}")

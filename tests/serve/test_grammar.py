"""Schemas and tools: what llguidance would not keep to is refused in one line, whatever JSON it is."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serving import MESSAGES, Served, chat

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.serve.grammar import NO_ARGUMENTS, GrammarConstraint, Grammars
from sparsepack.serve.json_schema import closed
from sparsepack.serve.reasoning import THINK, Reasoning
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tool_formats import FORMATS, HERMES, NamedFormat
from sparsepack.serve.tools import ToolCallParser

BEYOND = [10**19, -(10**19), 2**63, -(2**63) - 1, 1e19, float("nan"), float("inf"), 2**53 + 1, 10**4000, "5", None]
HOSTILE = {
    "NaN": '{"minimum":NaN}',
    "infinity": '{"minimum":1e400}',
    "4,000 digits": '{"minimum":' + "9" * 4000 + "}",
    "150 levels": '{"a":' * 150 + "1" + "}" * 150,
    "150 lists": '{"enum":' + "[" * 150 + "]" * 150 + "}",
    "NaN as data": '{"const":NaN}',
    "infinity as data": '{"enum":[1e400]}',
    "digits as data": '{"default":' + "9" * 4000 + "}",
    "half a character": '{"const":"\\ud800"}',
    "15,000 levels": '{"a":' * 15_000 + "1" + "}" * 15_000,
}


@pytest.fixture(scope="module")
def grammars(model: Model) -> Grammars:
    return Grammars(model)


def refusal(grammars: Grammars, schema: Any) -> str:
    with pytest.raises(Refusal) as caught:
        grammars.of_json(schema, "response_format")
    with pytest.raises(Refusal) as of_tool:
        grammars.of_calls(HERMES, [("f", schema)], "tools")
    for each in (caught.value, of_tool.value):
        assert each.status == 400
        assert "\n" not in each.message
        assert len(each.message) < 400
    return caught.value.message


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("stands", ["response_format", "tools"])
def test_json_that_no_schema_is_made_of_is_a_400_of_one_line(served: Served, stands: str, schema: str) -> None:
    places = {
        "response_format": '{"type":"json_schema","json_schema":{"name":"x","schema":%s}}',
        "tools": '[{"type":"function","function":{"name":"f","parameters":%s}}],"tool_choice":"required"',
    }
    asked = f'"{stands}":{places[stands] % schema}'
    body = f'{{"model":"tiny","messages":{json.dumps(MESSAGES)},"max_tokens":1,{asked}}}'
    answer = httpx.post(
        f"{served.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400, answer.text
    assert "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", BEYOND, ids=range(len(BEYOND)))
def test_a_bound_that_would_be_rounded_is_refused(grammars: Grammars, name: str, bound: Any) -> None:
    assert name in refusal(grammars, {"type": "integer", name: bound})


@pytest.mark.parametrize(
    "around",
    [
        lambda schema: {"$defs": {"a": schema}, "$ref": "#/$defs/a"},
        lambda schema: {"anyOf": [{"type": "string"}, schema]},
        lambda schema: {"type": "array", "prefixItems": [schema]},
        lambda schema: {"type": "object", "properties": {"minimum": schema}},
        lambda schema: {
            "type": "object",
            "properties": {"properties": {"type": "object", "properties": {"x": schema}}},
        },
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda schema: {"x-own": schema, "$ref": "#/x-own"},
        lambda schema: {"default": schema, "$ref": "#/default"},
        lambda schema: {"default": schema, "$ref": "#/d%65fault"},
        lambda schema: {"properties": {"maximum": 3}, "$ref": "#/properties"},
    ],
)
def test_a_bound_is_found_wherever_a_schema_can_stand(grammars: Grammars, around: Any) -> None:
    refusal(grammars, around({"type": "integer", "minimum": 10**19}))


def test_names_and_data_that_look_like_bounds_are_none(grammars: Grammars) -> None:
    named = {"minimum": {"type": "string"}, "multipleOf": {"type": "integer"}, "const": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {**named, "again": {"$ref": "#/properties/const"}},
        "default": {"minimum": 10**19},
        "$defs": {"maximum": {"enum": [{"maximum": 2.5}]}},
    }
    assert isinstance(grammars.of_json(schema, "response_format")(), GrammarConstraint)


@pytest.mark.parametrize("bound", [0, -5, 2.5, 1e15, -(10**15), 2**53])
def test_usual_bounds_are_kept_to(grammars: Grammars, bound: float) -> None:
    assert grammars.of_json({"type": "number", "minimum": bound}, "response_format")() is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**66 + 1},
        {"enum": ["a", [{"b": -(2**64)}]]},
        {"type": "array", "minItems": 2**40},
        {"type": "integer", "multipleOf": 10_001},
        {"allOf": [{"type": "integer", "multipleOf": 79}, {"type": "integer", "multipleOf": 128}]},  # 10,112 together
        {"type": "string", "maxLength": 10**30},
        {"x-guidance": {"lenient": True}},
        {"type": "string", "pattern": "("},
        {"type": "string", "minLength": -1},
        {"enum": []},
    ],
)
def test_what_llguidance_cannot_hold_or_would_ignore_is_refused(grammars: Grammars, schema: Any) -> None:
    refusal(grammars, schema)


@pytest.mark.parametrize("first", [True, False])
def test_every_token_that_may_come_next_is_taken(grammars: Grammars, model: Model, first: bool) -> None:
    """Also where the grammar leaves no choice of the bytes: spaces and ends of lines are among them."""
    constraint, ids = grammars.of_calls(HERMES, [("f", None)], "tools")(), []
    while (allowed := constraint.allowed().nonzero().flatten()).numel() and len(ids) < 300:
        ids.append(int(allowed[0 if first else -1]))
        if ids[-1] in model.engine.architecture.eos:
            break
        constraint.take(ids[-1])
    text = model.tokenizer.decode(ids)
    assert text.startswith('<tool_call>\n{"name": "f", "arguments": {')


def accepts(grammars: Grammars, model: Model, parameters: Any, arguments: str) -> bool:
    constraint = grammars.of_calls(HERMES, [("f", parameters)], "tools")()
    ids = model.tokenizer.encode(
        f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>', add_special_tokens=False
    ).ids
    try:
        for id in ids:
            constraint.take(id)
    except UserError:
        return False
    return True


def follows(constraint: Any, model: Model, text: str) -> bool:
    """Whether a constraint takes all tokens of a text, and then the end."""
    for id in [*model.tokenizer.encode(text, add_special_tokens=False).ids, model.engine.architecture.eos[0]]:
        if not constraint.allowed()[id]:
            return False
        constraint.take(id)
    return True


@pytest.mark.parametrize("name", [format.name for format in FORMATS])
def test_calls_of_every_form_are_followed(grammars: Grammars, model: Model, name: str) -> None:
    form = next(format for format in FORMATS if format.name == name)
    make = grammars.of_calls(form, [("f", {"type": "object", "properties": {}}), ("g", None)], "tools", several=True)
    constraint, ids = make(), list[int]()
    while (allowed := constraint.allowed().nonzero().flatten()).numel() and len(ids) < 300:
        ids.append(int(allowed[-1]))
        if ids[-1] in model.engine.architecture.eos:
            break
        constraint.take(ids[-1])
    reader = ToolCallParser(form, {"f": None, "g": None})
    parsed = reader.push(model.tokenizer.decode(ids, skip_special_tokens=False)) + reader.finish()
    assert {call.name for call in parsed.calls} <= {"f", "g"}
    assert parsed.calls


def test_marks_may_be_special_tokens(model: Model) -> None:
    read = json.loads(model.packed.tokenizer_json)
    mark = next(text for text, id in read["model"]["vocab"].items() if id == 700)
    added = {"id": 700, "content": mark, "special": True, **dict.fromkeys(("lstrip", "rstrip", "single_word"), False)}
    read["added_tokens"].append({**added, "normalized": False})
    packed = replace(model.packed, tokenizer_json=json.dumps(read))
    form = NamedFormat("special", "", f"{mark}$NAME$ARGUMENTS")
    make = Grammars(replace(model, packed=packed)).of_calls(form, [("f", None)], "tools", Reasoning(THINK, False))
    constraint = make()
    assert constraint.allowed()[700]
    constraint.take(700)
    assert follows(constraint, model, "f{}")
    assert not follows(make(), model, mark)


def test_an_object_ends_where_its_schema_names_no_more(grammars: Grammars, model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, kept in {
        '{"a": 1}': True,
        '{"a":1}': True,
        '{\n  "a": 1\n}': True,
        '{"a": 1, "b": 2}': False,
        '{\n\n"a": 1}': False,
        '{"a":  1}': False,
    }.items():
        assert follows(grammars.of_json(schema, "response_format")(), model, text) == kept, text


def test_a_schema_of_combined_parts_stays_open() -> None:
    named = {"properties": {"a": {}}}
    assert closed(named) == {**named, "additionalProperties": False}
    for schema in ({"allOf": [named, {"properties": {"b": {}}}]}, {**named, "anyOf": [{"required": ["b"]}]}):
        assert closed(schema) == schema
    for saying in ({"additionalProperties": True}, {"required": ["b"]}, {"minProperties": 2}):
        assert closed({**named, **saying}) == {**named, **saying}
    assert closed({"properties": {"properties": named}})["properties"]["properties"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("open", "text"),
    [(True, 'So </th {</think>\n\n{"a": 1}'), (False, '<think>So</think>{"a": 1}'), (False, '{"a": 1}'), (None, "{}")],
)
def test_the_reasoning_before_json_is_free(grammars: Grammars, model: Model, open: bool | None, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert follows(grammars.of_json(schema, "response_format", Reasoning(THINK, open))(), model, text)
    others = [(True, "{}"), (False, "So</think>{}"), (None, "<think></think>{}")]
    refused = next(text for kind, text in others if kind is open)
    assert not follows(grammars.of_json(schema, "response_format", Reasoning(THINK, open))(), model, refused)


def test_calls_are_kept_to_once_the_model_begins_them(grammars: Grammars, model: Model) -> None:
    make = grammars.of_optional_calls(HERMES, [("f", None)], "tools", Reasoning(THINK, False))
    assert make is not None
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text, kept in {
        "Any text <tool you like.": True,
        f"Well. {call}": True,
        f"Well. {call} And more.": False,
        f"<think>With <tool_call> or not</think>{call}": True,
        'Well. <tool_call>\n{"name": "g"': False,
    }.items():
        assert follows(make(), model, text) == kept, text


@pytest.mark.parametrize("parameters", [None, {}, NO_ARGUMENTS])
def test_a_tool_without_parameters_takes_no_arguments(grammars: Grammars, model: Model, parameters: Any) -> None:
    assert accepts(grammars, model, parameters, "{}")
    assert not accepts(grammars, model, parameters, '{"x": 1}')
    assert accepts(grammars, model, {"type": "object"}, '{"x": 1}')


def test_empty_arguments_sent_back_are_no_arguments(served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "12:00"}]
    assert chat(served, messages=messages, max_tokens=1).usage.completion_tokens == 1


class _PanicException(BaseException):
    pass


_PanicException.__name__ = "PanicException"


def test_a_panic_of_llguidance_is_the_request_s_error() -> None:
    class Matcher:
        def compute_logit_bias(self) -> bytes:
            raise _PanicException("index out of bounds")

        def consume_token(self, id: int) -> None:
            raise _PanicException("index out of bounds")

    constraint = GrammarConstraint(Matcher())
    with pytest.raises(UserError, match="index out of bounds"):
        constraint.allowed()
    with pytest.raises(UserError, match="index out of bounds"):
        constraint.take(1)


def test_calls_that_no_grammar_keeps_to_are_free_and_the_log_has_the_reason(
    grammars: Grammars, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"multipleOf": 999_983}}}
    assert grammars.of_optional_calls(HERMES, [("f", schema)], "tools") is None
    assert "without a grammar" in capsys.readouterr().err

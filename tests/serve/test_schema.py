"""What a request may say, and what is answered where it may not."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparsepack.serve.protocols.anthropic import MessagesBody
from sparsepack.serve.protocols.responses import ResponsesBody
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import IGNORED, NEUTRAL, ChatRequest, CompletionRequest, read_request

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def completion(**asked: Any) -> CompletionRequest:
    return read_request(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **asked}).encode())


def chat(**asked: Any) -> ChatRequest:
    return read_request(ChatRequest, json.dumps({**CHAT, **asked}).encode())


def refusal(body: Any, kind: Any = CompletionRequest, strict: bool = False) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_request(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), strict)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("Once", ["Once"]),
        ("", [""]),
        (None, [""]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_a_prompt_has_each_form_of_the_protocol(prompt: Any, taken: Any) -> None:
    assert completion(prompt=prompt).prompts == taken


@pytest.mark.parametrize("prompt", [5, [], [[]], [[1], "b"], [-1], [1.5], [True], {"a": 1}, ["a", 1], ["a"] * 257])
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    assert refusal({"model": "m", "prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("stop", "taken"),
    [
        (None, ()),
        ("", ()),
        ("a", ("a",)),
        (["a", "", None, "b"], ("a", "b")),
        ([], ()),
        (list("abcde"), tuple("abcde")),
    ],
)
def test_stop_strings_are_one_or_several(stop: Any, taken: Any) -> None:
    assert completion(stop=stop).stop_strings == taken


@pytest.mark.parametrize("stop", [["a"] * 65, 5, ["x" * 1001]])
def test_other_stop_strings_are_refused(stop: Any) -> None:
    assert refusal({"model": "m", "stop": stop}).param == "stop"


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_says_nothing_about_the_text_is_ignored(name: str) -> None:
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_this_server_cannot_do_is_taken_with_its_neutral_value_alone(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        assert chat(**{name: value}) == chat()
        if isinstance(value, int):
            assert refusal({**CHAT, name: 1 - value if isinstance(value, bool) else True}, ChatRequest).param == name
    found = refusal({**CHAT, name: 3}, ChatRequest)
    assert (found.param, found.code) == (name, "unsupported_value")
    assert found.message.startswith(f"{name}: not supported by this server; leave it out")


def test_a_field_that_is_not_known_is_ignored_and_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsepack.serve.liberal._named", set())
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    for _ in range(2):
        body = {"foo": 1, "structured_outputs": {"bar": True}, "messages": [{"role": "user", "content": [part]}]}
        assert chat(**body).messages[0].text == "Hello"
    (line,) = capsys.readouterr().err.splitlines()
    assert "foo" in line
    assert "structured_outputs.bar" in line
    assert "messages.content" in line
    assert "cache_control" in line


def test_made_up_fields_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsepack.serve.liberal._named", set())
    for batch in range(5):
        completion(**{f"field_{batch}_{n}": 1 for n in range(50)})
    assert capsys.readouterr().err.count("field_") == 100


def test_a_field_that_is_not_known_is_refused_in_openai_s_words_where_that_is_wanted() -> None:
    assert refusal({"model": "m", "foo": 1}, strict=True).message == "Unrecognized request argument supplied: foo"


@pytest.mark.parametrize(
    ("kind", "conversation", "part"),
    [
        (MessagesBody, "messages", {"type": "text", "text": "a", "cache_control": {}, "citations": None}),
        (MessagesBody, "messages", {"type": "thinking", "thinking": "a", "signature": "b"}),
        (ResponsesBody, "input", {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}),
    ],
)
def test_strict_refuses_unknown_fields_of_parts(kind: Any, conversation: str, part: dict[str, Any]) -> None:
    def body(**more: Any) -> Any:
        return {"max_tokens": 1, conversation: [{"role": "assistant", "content": [{**part, **more}]}]}

    read_request(kind, json.dumps(body()).encode(), strict=True)
    assert refusal(body(foo=1), kind, strict=True).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -3),
        ("top_k", 2**63),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 1.5),
        ("stream", "yes"),
        ("model", 5),
        ("best_of", 2),
        ("min_tokens", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    assert refusal({"model": "m", name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value", "field", "taken"),
    [
        ("temperature", 2.1, "temperature", 2.1),
        ("top_p", 0, "top_p", 1e-300),
        ("top_k", 0, "top_k", 2**31 - 1),
        ("top_k", -1, "top_k", 2**31 - 1),
        ("max_tokens", -1, "max_new_tokens", None),
        ("max_tokens", None, "max_new_tokens", None),
        ("frequency_penalty", 3, "frequency_penalty", 3),
        ("stream_options", {"include_usage": True}, "stream", None),
        ("stop", "", "stop_strings", ()),
        ("model", None, "model", ""),
    ],
)
def test_values_that_openai_does_not_take_are_taken_but_where_strict(
    name: str, value: Any, field: str, taken: Any
) -> None:
    assert getattr(completion(**{name: value}), field) == taken
    if value is not None or name == "model":
        assert refusal({"model": "m", name: value}, strict=True).param == name


JSON_FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
TOOLS = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}


@pytest.mark.parametrize(
    ("given", "standard"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "stop_strings": "a"}, {"max_tokens": 5, "stop": "a"}),
        ({"n_predict": 5, "max_tokens": 6}, {"max_tokens": 6}),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2, "repeat_last_n": -1}),
        ({"seed": -1}, {}),
        ({"seed": None, "stop": None, "response_format": None, "tools": None}, {}),
        ({"logit_bias": [[5, 2], [7, False]]}, {"logit_bias": {"5": 2, "7": -100}}),
        ({"best_of": 2, "n": 2}, {"n": 2}),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"response_format": JSON_FORMAT}),
        ({"response_format": {"type": "json_schema", "schema": {"type": "array"}}}, {"response_format": JSON_FORMAT}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "array"}}},
            {"response_format": JSON_FORMAT},
        ),
        ({"response_format": {"type": "json", "value": {"type": "array"}}}, {"response_format": JSON_FORMAT}),
        ({"response_format": "json_object"}, {"response_format": {"type": "json_object"}}),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": {"type": "array"}}, {"response_format": JSON_FORMAT}),
        ({"guided_json": '{"type": "array"}'}, {"response_format": JSON_FORMAT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", 'b"']}, {"grammar": 'start: "a" | "b\\""'}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"response_format": JSON_FORMAT}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"functions": [TOOL["function"]], "function_call": {"name": "f"}}, TOOLS),
        (
            {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": {"type": "function", "name": "f"}},
            TOOLS,
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, {"tools": [TOOL], "tool_choice": "required"}),
    ],
    ids=str,
)
def test_other_spellings_are_the_same_request(given: dict[str, Any], standard: dict[str, Any]) -> None:
    assert chat(**given) == chat(**standard)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": "{"}, "structured_outputs"),
        ({"guided_choice": []}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"guided_regex": 5}, "regex"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"best_of": 2, "n": "1"}, "n"),
        ({"functions": {"name": "f"}}, "functions"),
    ],
    ids=str,
)
def test_what_a_text_cannot_keep_to_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refusal({**CHAT, **given}, ChatRequest).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "m", "logit_bias": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    ],
)
def test_what_is_no_request_is_refused_in_one_line(body: bytes) -> None:
    assert len(refusal(body).message) < 300


def test_messages_are_texts_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "Ann"}]
    taken = [message.for_template() for message in chat(messages=messages).messages]
    assert taken == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls.0.function"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_other_messages_are_refused_by_place(message: Any, param: str) -> None:
    assert refusal({"model": "m", "messages": [message]}, ChatRequest).param == param


def test_arguments_of_too_many_values_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsepack.serve.messages.JSON_DECODER", None)
    function = {"name": "f", "arguments": '{"a": [' + "[]," * 20_000 + "[]]}"}
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    with pytest.raises(Refusal, match="more than 16,384 JSON values"):
        read_request(ChatRequest, json.dumps({"model": "m", "messages": [message]}).encode())


@pytest.mark.parametrize(
    ("message", "taken"),
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": ["a", {"type": "text", "text": "b"}, None, {"text": "c"}]},
            {"role": "user", "content": "abc"},
        ),
        ({"role": "function", "name": "f", "content": "7"}, {"role": "tool", "name": "f", "content": "7"}),
        ({"role": "tool", "content": "7", "tool_call_id": None}, {"role": "tool", "content": "7"}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "b"},
            {"role": "assistant", "content": "a", "reasoning_content": "b"},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": {"a": 1}}}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
    ],
    ids=str,
)
def test_messages_of_other_clients_are_taken(message: dict[str, Any], taken: dict[str, Any]) -> None:
    assert chat(messages=[message]).messages[0].for_template() == taken


def test_the_assistant_s_last_message_is_continued_unless_the_request_says_otherwise() -> None:
    question, begun = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert chat(messages=[question, begun]).continues_message
    assert not chat(messages=[question, begun], continue_final_message=False).continues_message
    assert chat(messages=[question], continue_final_message=True).continues_message
    for last in (question, {**begun, "content": ""}, {**begun, "tool_calls": [CALL]}):
        assert not chat(messages=[question, last]).continues_message


def test_calls_and_what_they_gave_are_messages_as_templates_take_them() -> None:
    messages = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7", "tool_call_id": "c1"}]
    taken = [message.for_template() for message in chat(messages=messages).messages]
    function = {"name": "f", "arguments": {"a": 1}}
    assert taken == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(id): 1 for id in range(1025)}}, "logit_bias"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": -100.1}, "presence_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "grammar": "x"}, "tool_choice"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_or_is_out_of_range_is_refused_by_name(asked: Any, param: str) -> None:
    assert refusal({**CHAT, **asked}, ChatRequest).param == param


def test_the_choice_of_a_tool_says_which_may_be_called() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    for choice, must, names in (
        (None, False, ["f", "g"]),
        ("auto", False, ["f", "g"]),
        ("none", False, []),
        ("required", True, ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, True, ["g"]),
    ):
        asked = chat(tools=[TOOL, other], tool_choice=choice)
        assert asked.requires_tool_call == must
        assert [tool.function.name for tool in asked.callable_tools] == names


def test_a_choice_of_tools_without_tools_is_ignored_but_where_strict() -> None:
    assert not chat(tool_choice="required").requires_tool_call
    assert refusal({**CHAT, "tool_choice": "required"}, ChatRequest, strict=True).param == "tool_choice"


def test_there_is_one_number_of_tokens() -> None:
    assert completion().max_new_tokens == 16
    assert chat().max_new_tokens is None
    assert chat(max_completion_tokens=3).max_new_tokens == chat(max_tokens=3).max_new_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=4).max_new_tokens == 3


def test_the_documentation_names_every_parameter() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    known = {*IGNORED, *NEUTRAL, *CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert {name for name in known if f"`{name}`" not in text} == set()


WRONG_BODIES = {
    "NaN": '"temperature": NaN',
    "infinity": '"temperature": 1e400',
    "a penalty that is not a number": '"frequency_penalty": NaN',
    "many texts": '"n": 1e400',
    "many texts as an integer": '"n": ' + "9" * 4000,
    "a number of tokens": '"max_tokens": -' + "9" * 400,
    "a seed": '"seed": ' + "9" * 40,
    "likelihoods": '"logprobs": 1000000000000000000000',
    "a bias that is not a number": '"logit_bias": {"1": NaN}',
    "an infinite bias": '"logit_bias": {"1": -1e400}',
    "a bias of a token with many digits": '"logit_bias": {"' + "9" * 400 + '": 1}',
    "half a character in a prompt": '"prompt": "\\ud800"',
    "half a character in a stop string": '"stop": "\\udc00"',
    "half a character in a grammar": '"grammar": "\\ud800"',
    "half a character in a name": '"\\ud800": 1',
    "the last of two values": '"n": 1, "n": 99',
    "levels": '"metadata": ' + "[" * 9000 + "]" * 9000,
}


@pytest.mark.parametrize("wrong", WRONG_BODIES.values(), ids=WRONG_BODIES)
def test_numbers_and_texts_that_are_none_are_a_400(wrong: str) -> None:
    refusal(f'{{"model": "m", {wrong}}}'.encode())


@pytest.mark.parametrize(
    "arguments", ["[" * 9000, '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', "null"]
)
def test_arguments_of_a_call_that_are_no_object_are_a_400(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    refusal({**CHAT, "messages": [{"role": "assistant", "tool_calls": [call]}]}, ChatRequest)


def test_empty_arguments_of_a_call_are_an_empty_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == {}

"""Calls of tools over HTTP, as the official client of OpenAI's protocol asks for them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from serving import MESSAGES, TEMPLATE, Served, chat

from sparsepack.loading import Model
from sparsepack.serve.dialect import Dialect
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.reasoning import THINK, Reasoning

HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}In <tool_call></tool_call>.\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}\n{% endfor %}"
)
LLAMA = HERMES.replace("<tool_call></tool_call>", '{"name": NAME, "parameters": ARGUMENTS}')
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama"])
def with_tools(model: Model, request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(replace(model, chat_template=request.param), ServeOptions()) as running:
        yield running


def test_a_call_that_must_be_made_is_made_and_what_it_gave_goes_into_the_chat(with_tools: Served) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "temperature": 1, "seed": 3}
    choice = chat(with_tools, **asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    chunks = list(chat(with_tools, **asked, stream=True))
    (streamed,) = (chunk.choices[0].delta.tool_calls[0] for chunk in chunks if chunk.choices[0].delta.tool_calls)
    assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    given = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
    given.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert chat(with_tools, messages=given, tools=[WEATHER]).choices[0].message.role == "assistant"


def test_the_schema_of_a_tool_may_refer_to_its_own_definitions(with_tools: Served) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    parameters = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "required": ["place"],
        "$defs": {"place": {**place, "additionalProperties": False}},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    message = chat(with_tools, tools=tools, tool_choice="required", max_tokens=200, seed=1).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["place"] == {"city": "Oslo"}


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": NaN}', "[1]"])
def test_arguments_that_are_no_json_object_in_utf_8_are_refused(with_tools: Served, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(openai.BadRequestError, match="expected a JSON object, as text"):
        chat(with_tools, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}], tools=[WEATHER])


@pytest.mark.parametrize(("parallel", "calls"), [(None, 2), (True, 2), (False, 1)])
def test_an_answer_has_one_call_where_calls_may_not_be_parallel(
    with_tools: Served, parallel: bool | None, calls: int
) -> None:
    hermes = "<tool_call>" in str(with_tools.model.chat_template)
    head, tail = ("<tool_call>\n", "\n</tool_call>") if hermes else ("", ";")
    written = json.dumps({"name": "weather", "arguments" if hermes else "parameters": {}})
    call = json.dumps(f"{head}{written}{tail}")
    asked = {"tools": [WEATHER], "extra_body": {"grammar": f"root ::= {call} {call}"}, "max_tokens": 300}
    asked |= {} if parallel is None else {"parallel_tool_calls": parallel}
    choice = chat(with_tools, **asked).choices[0]
    assert (len(choice.message.tool_calls), choice.message.content) == (calls, None)
    assert choice.finish_reason == "tool_calls"
    chunks = [chunk.choices[0].delta for chunk in chat(with_tools, **asked, stream=True)]
    assert [call.index for delta in chunks for call in delta.tool_calls or ()] == [*range(calls)]


def test_an_answer_cut_off_behind_a_call_says_so(with_tools: Served) -> None:
    hermes = "<tool_call>" in str(with_tools.model.chat_template)
    head, tail = ("<tool_call>\n", "\n</tool_call>") if hermes else ("", ";")
    written = json.dumps({"name": "weather", "arguments" if hermes else "parameters": {}})
    call = json.dumps(f"{head}{written}{tail}")

    def answer(grammar: str, most: int) -> Any:
        return chat(with_tools, tools=[WEATHER], extra_body={"grammar": grammar}, max_tokens=most, temperature=0)

    needed = answer(f"root ::= {call}", 300).usage.completion_tokens
    choice = answer(f"root ::= {call} {call}", needed + 3).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "length")


def test_the_template_is_told_of_the_tools_that_may_be_called(with_tools: Served) -> None:
    def prompt_tokens(**asked: Any) -> int:
        return int(chat(with_tools, max_tokens=0, **asked).usage.prompt_tokens)

    assert prompt_tokens(tools=[WEATHER]) > prompt_tokens() == prompt_tokens(tools=[WEATHER], tool_choice="none")


def test_without_a_call_the_answer_is_text(with_tools: Served) -> None:
    answer = chat(with_tools, tools=[WEATHER], temperature=0).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content
    assert answer.finish_reason == "length"


def test_a_template_without_tools_gets_them_in_a_system_message(served: Served) -> None:
    bare = chat(served, max_tokens=1).usage.prompt_tokens
    choice = chat(served, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")
    results = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), results]
    assert chat(served, messages=messages, tools=[WEATHER], max_tokens=1).usage.prompt_tokens > bare + 50


def test_an_empty_system_message_is_left_out_where_the_template_has_no_place_for_it(model: Model) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    dialect = Dialect(replace(model, chat_template=template))
    assert dialect.prompt([{"role": "system", "content": ""}, *MESSAGES], (), {}) == dialect.prompt(MESSAGES, (), {})


def test_several_calls_are_made_where_they_may_be_parallel(with_tools: Served) -> None:
    both = {"logit_bias": {str(id): -100 for id in with_tools.model.engine.architecture.eos}}
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 300, "temperature": 0, **both}
    assert len(chat(with_tools, **asked, parallel_tool_calls=True).choices[0].message.tool_calls) > 1
    assert len(chat(with_tools, **asked).choices[0].message.tool_calls) == 1


@pytest.fixture(scope="module")
def reasoning(model: Model) -> Iterator[Served]:
    """A server whose template begins the reasoning unless it is told not to."""
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
    template += "{% if enable_thinking is defined %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    with Served(replace(model, chat_template=template), ServeOptions()) as running:
        yield running


def test_reasoning_is_a_part_of_its_own_that_a_request_may_switch_off(reasoning: Served) -> None:
    message = chat(reasoning, temperature=0).choices[0].message
    assert message.reasoning_content
    assert not message.content
    deltas = [chunk.choices[0].delta for chunk in chat(reasoning, temperature=0, stream=True)]
    assert "".join(getattr(each, "reasoning_content", "") for each in deltas) == message.reasoning_content
    for off in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = chat(reasoning, temperature=0, **off).choices[0].message
        assert message.content
        assert not hasattr(message, "reasoning_content")


def test_reasoning_that_is_sent_back_reaches_the_template(reasoning: Served) -> None:
    def prompt_tokens(**more: str) -> int:
        messages = [*MESSAGES, {"role": "assistant", "content": "He.", **more}, *MESSAGES]
        return int(chat(reasoning, messages=messages, max_tokens=0).usage.prompt_tokens)

    assert prompt_tokens(reasoning_content="So many words of reasoning.") > prompt_tokens() + 4


def test_json_comes_behind_the_reasoning(reasoning: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    written = chat(reasoning, max_tokens=100, reasoning_effort="none", **asked).choices[0].message
    assert set(json.loads(written.content)) == {"a"}
    assert chat(reasoning, max_tokens=5, temperature=0, **asked).choices[0].message.reasoning_content


def test_no_reasoning_comes_before_json_where_it_is_switched_off(model: Model) -> None:
    dialect = Dialect(replace(model, chat_template=TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"))
    prompt = dialect.prompt(MESSAGES, (), {"enable_thinking": False})
    assert dialect.reasoning(prompt, {}) == Reasoning(THINK, open=False)
    assert dialect.reasoning(prompt, {"enable_thinking": False}) == Reasoning(THINK, open=None)


def test_the_text_has_the_reasoning_where_the_server_leaves_it_there(model: Model) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    for mode in ("text", "off"):
        with Served(replace(model, chat_template=template), ServeOptions(reasoning=mode)) as running:
            message = chat(running, temperature=0).choices[0].message
            assert message.content, mode
            assert not hasattr(message, "reasoning_content"), mode

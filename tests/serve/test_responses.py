"""OpenAI's Responses, as the official client meets them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from serving import Served
from test_tool_calls import HERMES

from sparsepack.loading import Model
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.protocols.stored_responses import StoredResponses
from sparsepack.serve.refusals import Refusal

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
TIME = {"type": "function", "name": "time"}


@pytest.fixture(scope="module")
def with_tools(model: Model) -> Iterator[Served]:
    with Served(replace(model, chat_template=f"{HERMES}<assistant>"), ServeOptions()) as running:
        yield running


def respond(served: Served, **options: Any) -> Any:
    options = {"input": "Who was there?", "max_output_tokens": 12, "temperature": 0, **options}
    return served.client().responses.create(model="tiny", **options)


def test_a_response_has_the_text_of_a_chat(served: Served) -> None:
    response = respond(served, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was there?"}]
    chat = served.client().chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert (response.instructions, response.max_output_tokens, response.tools) == ("Be brief.", 12, [])


def test_a_stream_has_the_events_of_a_response_in_their_order(served: Served) -> None:
    events = list(respond(served, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-1].response.output_text == respond(served).output_text


def test_a_function_is_called_and_its_output_sent_back(with_tools: Served) -> None:
    options = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200}
    response = respond(with_tools, **options)
    (call,) = response.output
    assert (response.status, call.type, call.name) == ("completed", "function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    kinds = [event.type.removeprefix("response.") for event in respond(with_tools, **options, stream=True)]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    item = ["output_item.added", *arguments, "output_item.done"]
    assert kinds == ["created", "in_progress", *item, "completed"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation = [{"role": "user", "content": "Who was there?"}, call.model_dump(), output]
    by_items = respond(with_tools, input=conversation, tools=[WEATHER])
    by_id = respond(with_tools, input=[output], previous_response_id=response.id, tools=[WEATHER])
    assert by_items.output_text == by_id.output_text
    assert by_items.usage.input_tokens == by_id.usage.input_tokens


def test_a_tool_may_be_forced_or_left_out_by_its_name(with_tools: Served) -> None:
    other = {**WEATHER, "name": "other"}
    choices = (
        {"type": "function", "name": "other"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
    )
    for choice in choices:
        response = respond(with_tools, tools=[WEATHER, other], tool_choice=choice, max_output_tokens=200)
        assert [item.name for item in response.output] == ["other"]


def test_text_keeps_to_its_format(served: Served) -> None:
    format = {"type": "json_schema", "name": "weather", "schema": PARAMETERS}
    response = respond(served, text={"format": format}, max_output_tokens=200)
    assert json.loads(response.output_text)["city"] in ("Oslo", "Rome")


def test_a_response_is_kept_until_it_is_deleted(served: Served) -> None:
    client = served.client()
    response = respond(served)
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    for missing in (response.id, respond(served, store=False).id):
        with pytest.raises(openai.NotFoundError, match="send the conversation as input"):
            client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError, match="send the conversation as input"):
            respond(served, previous_response_id=missing)


def test_the_client_with_the_most_responses_loses_its_oldest() -> None:
    stored = StoredResponses(most=3)
    for client, id in (("a", "1"), ("b", "2"), ("b", "3"), ("b", "4")):
        stored.put(client, {"id": id}, [])
    with pytest.raises(Refusal):
        stored.response("2")
    assert [stored.response(id)["id"] for id in "134"] == ["1", "3", "4"]
    small = StoredResponses(most_bytes=100)
    for id in "12":
        small.put("a", {"id": id}, [{"role": "user", "content": "x" * 50}])
    with pytest.raises(Refusal):
        small.conversation("1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search: this server runs no tools of its own"),
        ({"background": True}, "background: not supported by this server"),
        ({"extra_body": {"messages": []}}, "messages: not supported by this server; leave it out"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "expected one of message, function_call"),
        ({"input": []}, "input"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [TIME]}},
            "'time' is none of the tools",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(served: Served, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        respond(served, **change)

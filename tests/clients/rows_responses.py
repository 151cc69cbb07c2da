"""OpenAI's client for Python: Responses."""

import json

import openai
from rows import MODEL, row
from rows_openai import WEATHER

TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}


def _client(url, key):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def _respond(url, key, **options):
    options = {"input": "Who was there?", "max_output_tokens": 16, "temperature": 0, **options}
    return _client(url, key).responses.create(model=MODEL, **options)


@row("openai", "responses, input as text, instructions")
def text(url, key):
    response = _respond(url, key, instructions="Be brief.")
    assert response.output_text
    assert (response.status, response.usage.output_tokens) == ("incomplete", 16)
    return "16 tokens, incomplete for max_output_tokens"


@row("openai", "responses, stream")
def stream(url, key):
    events = list(_respond(url, key, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == _respond(url, key).output_text
    return "the same text in pieces, events from response.created to response.incomplete"


@row("openai", "responses.stream (helper)")
def helper(url, key):
    with _client(url, key).responses.stream(model=MODEL, input="Who was there?", max_output_tokens=16) as events:
        kinds = {event.type for event in events}
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds
    return "response.output_text.delta and done events"


@row("openai", "responses, function call, its output with previous_response_id")
def function(url, key):
    response = _respond(url, key, tools=[TOOL], tool_choice="required", max_output_tokens=500)
    (call,) = response.output
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = _respond(url, key, input=[output], previous_response_id=response.id, tools=[TOOL])
    assert answer.previous_response_id == response.id
    assert answer.output_text
    return "a call of weather whose arguments keep to its schema; then an answer"


@row("openai", "responses, items of an answer sent back as input")
def items(url, key):
    first = _respond(url, key, store=False)
    given = [{"role": "user", "content": "Who was there?"}, *first.output, {"role": "user", "content": "Go on."}]
    assert _respond(url, key, input=given, store=False).output_text
    return "an answer"


@row("openai", "responses, text.format json_schema")
def schema(url, key):
    format = {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}
    assert json.loads(_respond(url, key, text={"format": format}, max_output_tokens=500).output_text)
    return "JSON of the schema"


@row("openai", "responses.parse, a pydantic model")
def parse(url, key):
    from typing import Literal

    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]

    client = _client(url, key)
    response = client.responses.parse(model=MODEL, input="Where?", text_format=Weather, max_output_tokens=500)
    assert response.output_parsed.city in ("Oslo", "Rome")
    return "an instance of the model"


@row("openai", "responses.retrieve, delete, and retrieve again")
def stored(url, key):
    client, response = _client(url, key), _respond(url, key)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    try:
        client.responses.retrieve(response.id)
    except openai.NotFoundError:
        return "the response; NotFoundError once it is deleted"
    raise AssertionError("it was not deleted")


@row("openai", "responses, web_search")
def built_in(url, key):
    try:
        _respond(url, key, tools=[{"type": "web_search"}])
    except openai.BadRequestError:
        return "BadRequestError: this server runs no tools of its own"
    raise AssertionError("it was taken")

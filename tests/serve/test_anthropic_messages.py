"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import Served, server_sent_events
from test_tool_calls import HERMES

from sparsepack.loading import Model
from sparsepack.serve.options import ServeOptions

BODY = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Who was there?"}],
}
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def with_tools(model: Model) -> Iterator[Served]:
    template = f"{HERMES}<assistant>"
    with Served(replace(model, chat_template=template), ServeOptions(api_keys=("key",))) as running:
        yield running


def post(served: Served, path: str = "/v1/messages", key: str = "key", **more: Any) -> Any:
    with served.http(headers={"x-api-key": key, "anthropic-version": "2023-06-01"}) as client:
        return client.post(path, json={**BODY, **more})


def test_a_message_has_the_text_of_a_chat(served: Served) -> None:
    message = post(
        served, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ).json()
    messages = [{"role": "system", "content": "Be brief."}, *BODY["messages"]]
    chat = served.client().chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    assert usage["output_tokens"] == 12
    counted = post(served, "/v1/messages/count_tokens", system="Be brief.").json()
    assert counted == {"input_tokens": chat.usage.prompt_tokens}


def test_tokens_are_counted_of_a_conversation_that_is_longer_than_the_context(served: Served) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    assert post(served, messages=long).status_code == 400
    assert post(served, "/v1/messages/count_tokens", messages=long).json()["input_tokens"] > 1024


def test_a_stream_has_the_events_of_a_message_in_their_order(served: Served) -> None:
    whole = post(served).json()
    events = server_sent_events(post(served, stream=True).text)
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(kind == data["type"] for kind, data in events)
    text = "".join(data["delta"]["text"] for kind, data in events if kind == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 12


def test_the_stop_sequence_that_ended_a_message_is_named(served: Served) -> None:
    text = post(served, max_tokens=40).json()["content"][0]["text"]
    message = post(served, max_tokens=40, stop_sequences=[text[9:12], "\x00"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[9:12])
    assert message["content"][0]["text"] == text.partition(text[9:12])[0]


def test_tokens_that_the_context_has_no_room_for_are_left_out(served: Served) -> None:
    message = post(served, max_tokens=32000, temperature=1, top_k=5).json()
    assert message["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_a_tool_is_used_and_its_result_sent_back(with_tools: Served) -> None:
    options = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
    message = post(with_tools, **options).json()
    assert message["stop_reason"] == "tool_use"
    (use,) = message["content"]
    assert (use["type"], use["name"]) == ("tool_use", "weather")
    assert use["input"]["city"] in ("Oslo", "Rome")
    events = server_sent_events(post(with_tools, **options, stream=True).text)
    deltas = [data["delta"] for kind, data in events if kind == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == use["input"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = post(with_tools, messages=[*BODY["messages"], *turns], tools=[WEATHER])
    assert answer.status_code == 200
    assert answer.json()["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "this server reads no images"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "this server runs no tools of its own"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"n": 2}, "this protocol has one answer"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(served: Served, change: dict[str, Any], says: str) -> None:
    answer = post(served, **change)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert says in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "key", "status", "kind"),
    [
        ("/v1/messages", "wrong", 401, "authentication_error"),
        ("/v1/messages/batches", "key", 404, "not_found_error"),
    ],
)
def test_errors_have_the_form_of_the_protocol(with_tools: Served, path: str, key: str, status: int, kind: str) -> None:
    answer = post(with_tools, path, key)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)

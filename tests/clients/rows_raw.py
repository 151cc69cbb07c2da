"""Bodies as editors and agents send them, by httpx."""

import json

import httpx
from rows import MODEL, row
from rows_openai import WEATHER

SYSTEM = "You are a coding assistant. Answer briefly."
FILE = "Here is the file `a.py`:\n```python\nprint(1)\n```"


def _post(url, path, body, headers):
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def _events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@row("httpx", "a chat of an editor (stream, max_tokens, stop, assistant and tool turns)")
def editor(url, key):
    call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["</file>"],
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": FILE}, {"type": "text", "text": "What does it do?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
        ],
        "tools": [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}],
    }
    events = _events(_post(url, "/v1/chat/completions", body, {"authorization": f"Bearer {key}"}))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return "the text in pieces"


@row("httpx", "a fill-in of an editor (completions, stream, stop)")
def completion(url, key):
    body = {"model": MODEL, "prompt": "def add(a, b):\n", "stream": True, "max_tokens": 16, "temperature": 0.01}
    events = _events(_post(url, "/v1/completions", {**body, "stop": ["\n\n"]}, {"authorization": f"Bearer {key}"}))
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    return "the text in pieces"


@row("httpx", "a turn of a terminal agent by messages (system blocks, cache_control, tools, large max_tokens, stream)")
def agent_by_messages(url, key):
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_1"},
        "system": [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "Be careful.", **cached}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>1</system-reminder>"},
                    {"type": "text", "text": FILE},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look at the weather."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny", **cached}],
            },
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": WEATHER}],
    }
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01"}
    events = _events(_post(url, "/v1/messages?beta=true", body, headers))
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] in ("end_turn", "tool_use", "model_context_window_exceeded")
    return "events from message_start to message_stop"


@row(
    "httpx", "a turn of a terminal agent by Responses (developer message, function tools, include, store false, stream)"
)
def agent_by_responses(url, key):
    body = {
        "model": MODEL,
        "instructions": SYSTEM,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look at the weather."}]},
            {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        "tools": [{"type": "function", "name": "weather", "description": "d", "strict": False, "parameters": WEATHER}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "store": False,
        "stream": True,
        "max_output_tokens": 16,
    }
    events = _events(_post(url, "/v1/responses", body, {"authorization": f"Bearer {key}"}))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    return "events from response.created to the last"

"""Ollama's client for Python."""

import json

import ollama
from rows import MODEL, row

MESSAGES = [{"role": "user", "content": "Who was there?"}]
OPTIONS = {"temperature": 0, "num_predict": 16, "num_ctx": 512}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def _client(url, key):
    return ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


def _chat(url, key, **options):
    return _client(url, key).chat(model=MODEL, messages=MESSAGES, **{"options": OPTIONS, **options})


@row("ollama", "list, ps, show")
def models(url, key):
    client = _client(url, key)
    assert [model.model for model in client.list().models] == [f"{MODEL}:latest"]
    assert client.ps().models[0].context_length == 1024
    assert "completion" in client.show(f"{MODEL}:latest").capabilities
    return f"the model {MODEL}:latest"


@row("ollama", "chat")
def chat(url, key):
    answer = _chat(url, key)
    assert answer.message.content
    assert (answer.done_reason, answer.eval_count) == ("length", 16)
    return "16 tokens, done_reason length"


@row("ollama", "chat, stream")
def chat_stream(url, key):
    pieces = list(_chat(url, key, stream=True))
    assert "".join(piece.message.content for piece in pieces) == _chat(url, key).message.content
    assert pieces[-1].eval_duration > 0
    return "the same text in pieces, and the durations"


@row("ollama", "chat, format: a schema")
def chat_schema(url, key):
    content = _chat(url, key, format=SCHEMA, options={"temperature": 0}).message.content
    assert json.loads(content)["city"] in ("Oslo", "Rome")
    return "JSON of the schema"


@row("ollama", "chat, a tool's call and its result sent back")
def chat_tools(url, key):
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    result = {"role": "tool", "content": "sunny", "tool_name": "weather"}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    answer = _client(url, key).chat(model=MODEL, messages=messages, tools=[tool], options=OPTIONS)
    assert answer.message.role == "assistant"
    return "an answer"


@row("ollama", "generate, with a template and raw")
def generate(url, key):
    client = _client(url, key)
    answered = client.generate(model=MODEL, prompt="Who?", system="Be brief.", options=OPTIONS)
    raw = client.generate(model=MODEL, prompt="Who?", raw=True, options=OPTIONS)
    assert answered.prompt_eval_count > raw.prompt_eval_count
    return "two answers; the template's prompt is longer"


@row("ollama", "generate without a prompt")
def load(url, key):
    assert _client(url, key).generate(model=MODEL).done_reason == "load"
    return "done_reason load"


@row("ollama", "embed")
def embed(url, key):
    try:
        _client(url, key).embed(model=MODEL, input="a")
    except ollama.ResponseError as error:
        return f"ResponseError {error.status_code}: no embeddings"
    raise AssertionError("there was an embedding")

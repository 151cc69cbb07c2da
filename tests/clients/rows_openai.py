"""OpenAI's client for Python: models, completions and chats."""

import json

import openai
from rows import MODEL, row

MESSAGES = [{"role": "user", "content": "Who was there?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def _client(url, key):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def _chat(url, key, **options):
    options = {"max_tokens": 16, "temperature": 0, **options}
    return _client(url, key).chat.completions.create(model=MODEL, messages=MESSAGES, **options)


@row("openai", "models.list")
def models(url, key):
    names = [model.id for model in _client(url, key).models.list()]
    assert names == [MODEL]
    return f"the model {names[0]}"


@row("openai", "completions, stop string")
def completion(url, key):
    options = {"model": MODEL, "prompt": "There was a king who", "max_tokens": 24, "temperature": 0}
    whole = _client(url, key).completions.create(**options)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)
    stop = whole.choices[0].text[8:11]
    stopped = _client(url, key).completions.create(**options, stop=stop).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.choices[0].text.partition(stop)[0])
    return "24 tokens, finish_reason length; the text before the stop string, finish_reason stop"


@row("openai", "completions, stream")
def completion_stream(url, key):
    options = {"model": MODEL, "prompt": "There was a king who", "max_tokens": 24, "temperature": 0}
    whole = _client(url, key).completions.create(**options).choices[0].text
    assert (
        "".join(chunk.choices[0].text for chunk in _client(url, key).completions.create(**options, stream=True))
        == whole
    )
    return "the same text in pieces"


@row("openai", "chat")
def chat(url, key):
    answer = _chat(url, key)
    assert answer.choices[0].message.content
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)
    return "16 tokens, finish_reason length"


@row("openai", "chat, stream with usage")
def chat_stream(url, key):
    chunks = list(_chat(url, key, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == _chat(url, key).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 16
    return "the same text in pieces, and the usage"


@row("openai", "chat.completions.stream (helper)")
def chat_helper(url, key):
    grammar = {"grammar": 'root ::= "A king."'}  # the helper raises where a limit ends the text
    with _client(url, key).chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=grammar) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == "A king."
    assert {"chunk", "content.delta", "content.done"} <= kinds
    return "content.delta and content.done events"


@row("openai", "chat, n = 2 with logprobs")
def chat_logprobs(url, key):
    answer = _chat(url, key, n=2, logprobs=True, top_logprobs=2, temperature=1)
    assert [len(choice.logprobs.content) for choice in answer.choices] == [16, 16]
    return "two choices with log-probabilities"


@row("openai", "chat, tool_choice required, then the tool's result")
def chat_tools(url, key):
    message = _chat(url, key, tools=[TOOL], tool_choice="required", max_tokens=500).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*MESSAGES, message.model_dump(exclude_none=True), result]
    answer = _client(url, key).chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    return "a call of weather whose arguments keep to its schema; then an answer"


@row("openai", "chat, tools, stream")
def chat_tools_stream(url, key):
    chunks = list(_chat(url, key, tools=[TOOL], tool_choice="required", max_tokens=500, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in ("Oslo", "Rome")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    return "the call, finish_reason tool_calls"


@row("openai", "chat, response_format json_schema")
def chat_schema(url, key):
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    content = _chat(url, key, response_format=schema, max_tokens=500).choices[0].message.content
    assert json.loads(content)["city"] in ("Oslo", "Rome")
    return "JSON of the schema"


@row("openai", "chat, a key that is wrong")
def wrong_key(url, key):
    try:
        _chat(url, "wrong")
    except openai.AuthenticationError:
        return "AuthenticationError"
    raise AssertionError("it was let in")


@row("openai", "chat, AsyncOpenAI, four at a time")
def chat_async(url, key):
    import asyncio

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client:
            one = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16}
            return await asyncio.gather(*(client.chat.completions.create(**one) for _ in range(4)))

    assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))
    return "four answers"

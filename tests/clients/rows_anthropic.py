"""Anthropic's client for Python."""

import anthropic
from rows import MODEL, row
from rows_openai import WEATHER

MESSAGES = [{"role": "user", "content": "Who was there?"}]
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}


def _client(url, key):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)


def _send(url, key, **options):
    options = {"messages": MESSAGES, "max_tokens": 16, **options}
    return _client(url, key).messages.create(model=MODEL, **options)


@row("anthropic", "messages, system")
def message(url, key):
    answer = _send(url, key, system="Be brief.")
    assert answer.content[0].text
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 16)
    return "16 tokens, stop_reason max_tokens"


@row("anthropic", "messages, system and content as blocks with cache_control")
def blocks(url, key):
    block = {"type": "text", "text": "Who was there?", "cache_control": {"type": "ephemeral"}}
    answer = _send(url, key, system=[{**block, "text": "Be brief."}], messages=[{"role": "user", "content": [block]}])
    assert answer.content[0].text
    return "an answer"


@row("anthropic", "messages.stream (helper)")
def stream(url, key):
    with _client(url, key).messages.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 16)
    return "the text in pieces, then the whole message"


@row("anthropic", "messages, stop_sequences")
def stop(url, key):
    greedy = {"max_tokens": 24, "extra_body": {"temperature": 0}}
    text = _send(url, key, **greedy).content[0].text
    answer = _send(url, key, **greedy, stop_sequences=[text[8:11]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[8:11])
    assert answer.content[0].text == text.partition(text[8:11])[0]
    return "the text before it, stop_reason stop_sequence, and which"


@row("anthropic", "messages, tool_choice any, then the tool's result")
def tool(url, key):
    answer = _send(url, key, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=500)
    (use,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert use.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert _send(url, key, messages=[*MESSAGES, *turns], tools=[TOOL]).content
    return "a use of weather whose input keeps to its schema; then an answer"


@row("anthropic", "messages.stream, tool_choice tool")
def tool_stream(url, key):
    options = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 500}
    with _client(url, key).messages.stream(model=MODEL, messages=MESSAGES, **options) as events:
        kinds = {event.type for event in events}
        (use,) = events.get_final_message().content
    assert "input_json" in kinds
    assert use.input["city"] in ("Oslo", "Rome")
    return "input_json events, and the tool's use"


@row("anthropic", "messages.count_tokens")
def count(url, key):
    counted = _client(url, key).messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = _send(url, key).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    return "as many tokens as the usage of a message has"


@row("anthropic", "messages, an image")
def image(url, key):
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    try:
        _send(url, key, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    except anthropic.BadRequestError:
        return "BadRequestError: this server reads no images"
    raise AssertionError("it was taken")


@row("anthropic", "messages, a key that is wrong")
def wrong_key(url, key):
    try:
        _send(url, "wrong")
    except anthropic.AuthenticationError:
        return "AuthenticationError"
    raise AssertionError("it was let in")

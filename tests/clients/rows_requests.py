"""Bodies as clients of other servers send them, by httpx: llama.cpp, vLLM, older clients of OpenAI, lm-eval."""

import json

import httpx
from rows import MODEL, row

MESSAGES = [{"role": "user", "content": "Who was there?"}]
PROMPT = "There was a king who"
LONG = {"max_tokens": 100, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def _post(url, key, path, status=200, **body):
    answer = httpx.post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def _chat(url, key, **body):
    return _post(url, key, "/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 8, **body})


def _text(url, key, **body):
    return _chat(url, key, **body)["choices"][0]["message"]["content"]


@row("httpx", "chat, no model; another model's name")
def model(url, key):
    assert {_chat(url, key)["model"], _chat(url, key, model="gpt-4o")["model"]} == {MODEL}
    return f"answers of {MODEL}"


@row("httpx", "chat, fields that nobody knows, cache_control, null for optional fields")
def unknown(url, key):
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    nothing = dict.fromkeys(("stop", "seed", "tools", "tool_choice", "response_format", "logit_bias", "n"))
    _chat(url, key, messages=[{"role": "user", "content": [part], "x": 1}], nonsense=1, **nothing)
    return "an answer; the fields are named in the log"


@row("httpx", "llama.cpp: n_predict, json_schema, cache_prompt, top_k 0, seed -1")
def llama_cpp(url, key):
    body = {"n_predict": 100, "json_schema": SCHEMA, "cache_prompt": True, "top_k": 0, "seed": -1}
    text = _post(url, key, "/v1/chat/completions", messages=MESSAGES, **body)["choices"][0]["message"]["content"]
    assert json.loads(text)["city"] in ("Oslo", "Rome")
    return "JSON of the schema"


@row("httpx", "vLLM: guided_choice, guided_regex, structured_outputs")
def vllm(url, key):
    assert _text(url, key, guided_choice=["king", "queen"], **LONG) in ("king", "queen")
    assert _text(url, key, guided_regex="[0-9]{3}", **LONG).isdigit()
    assert json.loads(_text(url, key, structured_outputs={"json": SCHEMA}, **LONG))["city"] in ("Oslo", "Rome")
    return "texts that keep to them"


@row("httpx", "vLLM: ignore_eos, min_tokens, stop_token_ids, repetition_penalty")
def vllm_sampling(url, key):
    options = {"ignore_eos": True, "min_tokens": 4, "stop_token_ids": [1], "repetition_penalty": 1.2}
    answer = _post(url, key, "/v1/completions", prompt=PROMPT, max_tokens=8, **options)
    assert answer["usage"]["completion_tokens"] >= 4
    return "at least 4 tokens"


@row("httpx", "response_format json_object with schema")
def together(url, key):
    format = {"type": "json_object", "schema": SCHEMA}
    assert json.loads(_text(url, key, response_format=format, **LONG))["city"] in ("Oslo", "Rome")
    return "JSON of the schema"


@row("httpx", "chat, functions and function_call")
def functions(url, key):
    body = {"functions": [{"name": "weather", "parameters": SCHEMA}], "function_call": {"name": "weather"}}
    (call,) = _chat(url, key, max_tokens=200, **body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    return "a call, as tool_calls"


@row("httpx", "chat, the assistant's message at the end is continued")
def continued(url, key):
    begun = [*MESSAGES, {"role": "assistant", "content": "There was"}]
    assert _text(url, key, messages=begun, temperature=0) != _text(
        url, key, messages=begun, temperature=0, continue_final_message=False
    )
    return "another text than with continue_final_message: false"


@row("httpx", "completions, a list of prompts")
def prompts(url, key):
    answer = _post(url, key, "/v1/completions", prompt=[PROMPT, "Once"], max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    return "two choices"


@row("httpx", "lm-eval's loglikelihood: echo, logprobs 1, max_tokens 1, a batch of token ids")
def loglikelihood(url, key):
    body = {"prompt": [[0, 5, 6, 7], [0, 8]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = _post(url, key, "/v1/completions", model=MODEL, seed=1234, **body)["choices"]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert list(map(len, logprobs)) == [5, 3]
    assert all(each[0] is None and all(value < 0 for value in each[1:]) for each in logprobs)
    return "a log-probability for each token but the first"


@row("httpx", "tokenize and detokenize of llama.cpp and of vLLM")
def tokenize(url, key):
    ids = _post(url, key, "/tokenize", content=PROMPT)["tokens"]
    assert _post(url, key, "/tokenize", prompt=PROMPT)["tokens"] == [0, *ids]
    assert _post(url, key, "/tokenize", messages=MESSAGES)["count"] > 4
    assert _post(url, key, "/detokenize", tokens=ids)["content"] == PROMPT
    return "the same text again"


@row("httpx", "chat with an image; embeddings")
def refused(url, key):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    chat = {"messages": [{"role": "user", "content": [part]}]}
    assert "no images" in _post(url, key, "/v1/chat/completions", 400, **chat)["error"]["message"]
    _post(url, key, "/v1/embeddings", 501, input="a")
    return "400 and 501, each with the reason"

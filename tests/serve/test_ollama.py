"""Ollama's protocol: its lines, its lists, and what it refuses. `make clients` tries its own clients."""

import json
from typing import Any

import pytest
from pydantic_core import from_json
from serving import MESSAGES, Served

from sparsepack.serve.answer import json_bytes

GREEDY = {"temperature": 0, "num_predict": 8}


def post(served: Served, path: str, **body: Any) -> Any:
    answer = served.http().post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer


def text_of(served: Served, **given: Any) -> str:
    """What a chat of OpenAI's protocol answers."""
    given = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, **given}
    return str(post(served, "/v1/chat/completions", **given).json()["choices"][0]["message"]["content"])


def test_a_chat_is_a_stream_of_lines_of_which_the_last_has_the_counts(served: Served) -> None:
    answer = post(served, "/api/chat", messages=MESSAGES, options=GREEDY)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = map(json.loads, answer.text.splitlines())
    assert "".join(piece["message"]["content"] for piece in pieces) == text_of(served)
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 8)
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    assert {line["model"] for line in (*pieces, last)} == {"tiny:latest"}


def test_an_answer_in_one_piece_has_the_same_text(served: Served) -> None:
    answer = post(served, "/api/chat", messages=MESSAGES, options=GREEDY, stream=False, model="tiny:latest").json()
    assert answer["message"] == {"role": "assistant", "content": text_of(served)}
    assert (answer["done"], answer["eval_count"]) == (True, 8)


def test_generate_answers_a_message_or_continues_a_raw_prompt(served: Served) -> None:
    chat = post(served, "/api/generate", prompt="Hello", system="Be brief.", options=GREEDY, stream=False).json()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert chat["response"] == text_of(served, messages=messages)
    raw = post(served, "/api/generate", prompt="Hello", raw=True, options=GREEDY, stream=False).json()
    plain = post(served, "/v1/completions", prompt="Hello", temperature=0, max_tokens=8).json()
    assert raw["response"] == plain["choices"][0]["text"]
    loaded = post(served, "/api/generate", stream=False).json()
    assert (loaded["response"], loaded["done_reason"]) == ("", "load")


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}])
def test_a_text_keeps_to_a_format(served: Served, format: Any) -> None:
    options = {"temperature": 0, "num_predict": 200}
    answer = post(served, "/api/chat", messages=MESSAGES, format=format, options=options, stream=False).json()
    # Free JSON may go on to the limit of tokens.
    partial: Any = "trailing-strings" if answer["done_reason"] == "length" else False
    value = from_json(answer["message"]["content"], allow_partial=partial)
    assert value == {"a": 1} if isinstance(format, dict) else isinstance(value, dict)


def test_the_model_is_listed_and_shown(served: Served) -> None:
    with served.http() as http:
        for path in ("/api/tags", "/api/ps"):
            (model,) = http.get(path).json()["models"]
            assert model["name"] == model["model"] == "tiny:latest"
        assert http.get("/api/version").json() == {"version": "0.12.0"}
        shown = http.post("/api/show", json={"model": "tiny"}).json()
        assert shown["model_info"]["llama.context_length"] == 1024
        assert "completion" in shown["capabilities"]
        missing = http.post("/api/show", json={"model": "other"})
        assert (missing.status_code, missing.json()) == (404, {"error": "model 'other': this server has 'tiny'"})


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, 400, "reads text only"),
        ("chat", {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role"),
        ("generate", {"prompt": "a", "images": ["eA=="]}, 400, "reads text only"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"prompt": "a", "options": {"temperature": "hot"}}, 400, "temperature"),
        ("generate", {"prompt": "a", "options": {"n": 2}}, 400, "one answer"),
        ("embed", {"input": "a"}, 501, "no embeddings"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_an_error_in_its_form(
    served: Served, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    answer = served.http().post(f"/api/{path}", json={"model": "tiny", **body})
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_an_event_of_a_stream_is_one_line_for_clients_that_split_at_every_end_of_lines_of_unicode() -> None:
    body = {"response": "a\u2028b\u2029c\x85d\x0be"}
    (line,) = json_bytes(body).decode().splitlines()
    assert json.loads(line) == body

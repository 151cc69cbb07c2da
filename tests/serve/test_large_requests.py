"""Requests of megabytes: what cannot fit is refused before anything is made of it, and others are served meanwhile."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from serving import Served

from sparsepack.loading import Model
from sparsepack.serve import prepare
from sparsepack.serve.guards import MAX_BODY_BYTES, MAX_JSON_VALUES, check_values
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.refusals import Refusal

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def unbounded(model: Model) -> Iterator[Served]:
    """A server whose tokenizer does not tell how long a prompt can be."""
    with Served(model, ServeOptions()) as running:
        running.service.prompts.max_prompt_bytes = None
        running.service.prompts.max_body_bytes = MAX_BODY_BYTES
        yield running


def refused(served: Served, body: Any) -> str:
    """The message of the refusal of a body."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    with served.http(headers=JSON) as http:
        answer = http.post("/v1/completions", content=content)
    assert answer.status_code in (400, 413)
    return str(answer.json()["error"]["message"])


def test_health_answers_while_a_long_prompt_is_tokenised(unbounded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    events, begun = [], threading.Event()
    tokenise = prepare.prompt_tokens

    def observed(*args: Any) -> list[int]:
        begun.set()
        ids = tokenise(*args)
        events.append("tokenised")
        return ids

    monkeypatch.setattr(prepare, "prompt_tokens", observed)
    with unbounded.http() as http:
        assert http.get("/health").status_code == 200
        asking = threading.Thread(target=refused, args=(unbounded, {"prompt": " " * 3_500_000}))
        asking.start()
        assert begun.wait(30)
        while "tokenised" not in events:
            assert http.get("/health").status_code == 200
            events.append("health")
        asking.join()
    assert events.index("tokenised") >= 5, "one or two answers could come before the tokenizer begins"


@pytest.mark.parametrize("character", [" ", "a", "\u1234", "\U0001f600", "\x01"])
def test_a_prompt_of_more_bytes_than_can_fit_is_refused_and_not_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    monkeypatch.setattr(prepare, "prompt_tokens", lambda *_: pytest.fail("tokenised"))
    most = served.service.prompts.max_prompt_bytes
    assert most is not None
    count = most // len(character.encode()) + 1
    message = refused(served, {"prompt": character * count})
    assert "maximum context length is 1024 tokens here: shorten the prompt" in message


def test_a_prompt_of_as_many_bytes_as_can_fit_is_taken(served: Served) -> None:
    text = max(map(served.service.prompts.bytes_of.of, range(768)), key=len).decode() * 1024
    assert len(text) == served.service.prompts.max_prompt_bytes
    with served.http() as http:
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 0})
    assert answer.status_code == 200


def test_a_body_has_room_for_every_prompt_that_fits_whatever_its_escapes(served: Served) -> None:
    most = served.service.prompts.max_prompt_bytes
    assert most is not None
    body = '{"model": "tiny", "prompt": "' + "\\u0041" * most + '"}'
    assert len(body) <= served.service.prompts.max_body_bytes


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": [' + b"1," * 100_000 + b"1]}",
        b'{"model": "tiny", "prompt": [' + b'"a",' * 50_000 + b'"a"]}',
        b'{"model": "tiny", "metadata": [' + b"[]," * 60_000 + b"[]]}",
        b'{"model": "tiny"' + b',"\\"":1' * 30_000 + b"}",
        b"[" * 200_000,
        b'"' * 200_000,
    ],
    ids=["ids", "texts", "lists", "names", "deep", "quotes"],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_made(
    served: Served, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr("sparsepack.serve.protocols.openai.read_request", lambda *_: pytest.fail("read"))
    assert f"the body has more than {MAX_JSON_VALUES + 1024:,} JSON values" in refused(served, body)


def test_commas_and_brackets_within_texts_are_no_values() -> None:
    text = json.dumps({"a": '\\",[{' * 1000, "b": '"\\' * 10})
    check_values(text.encode(), 3)
    with pytest.raises(Refusal, match="more than 1 JSON values"):
        check_values(text.encode(), 1)


def test_more_tokens_than_the_context_holds_are_refused_as_a_prompt(served: Served) -> None:
    assert "1,025 tokens of prompt; this model's maximum context" in refused(served, {"prompt": [5] * 1025})


def test_too_many_tokens_to_make_after_a_short_prompt_are_answered_with_how_many_fit(served: Served) -> None:
    message = refused(served, {"prompt": [5, 5], "max_tokens": 5000})
    assert message.endswith("1024 tokens here: give max_tokens of at most 1022")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(psutil.Process(), "memory_maps"), reason="memory is given back where glibc is")
def test_memory_of_a_long_prompt_is_given_back(unbounded: Served) -> None:
    refused(unbounded, {"prompt": " " * 100_000})
    before = psutil.Process().memory_info().rss
    for character in (" ", "a", "\x01"):
        refused(unbounded, {"prompt": character * (600_000 if character == "\x01" else 3_500_000)})  # escaped: 6 bytes
    assert psutil.Process().memory_info().rss - before < 128 * 2**20, "it would be hundreds of MB"

"""A model whose template or tokenizer fails, or takes all time, costs a request and never the server."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import MESSAGES, Served, tiny_model

from sparsepack.loading import Model
from sparsepack.models.tokenizer import sandbox
from sparsepack.models.tokenizer.sandbox import SandboxTokenizer
from sparsepack.runtime.generation.generate import open_tokenizer
from sparsepack.serve.options import ServeOptions

LOOPS = "{% if 'slow' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
TEMPLATE = f"{LOOPS}{{% endfor %}}{{% endif %}}x"


@pytest.fixture
def own(artifact: Path) -> Model:
    """A model whose tokenizer and template a test may change."""
    return tiny_model(artifact)


def chat(served: Served, content: str) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    with served.http() as client:
        return client.post("/v1/chat/completions", json=body)


def test_a_template_without_end_is_a_400_while_others_are_served(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    model = replace(own, chat_template=TEMPLATE)
    answers: list[Any] = []
    with Served(model, ServeOptions()) as served, served.http() as client:
        assert chat(served, "Hello").status_code == 200
        slow = threading.Thread(target=lambda: answers.append(chat(served, "slow")))
        slow.start()
        while slow.is_alive():
            assert client.get("/health", timeout=10).status_code == 200
        assert answers[0].status_code == 400
        assert "was ended" in answers[0].json()["error"]["message"]
        assert chat(served, "Hello").status_code == 200


def test_a_tokenizer_without_end_is_a_400(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    read = json.loads(own.packed.tokenizer_json)
    grows = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 100}
    hostile = json.dumps({**read, "normalizer": {"type": "Sequence", "normalizers": [grows] * 8}})
    own.__dict__["tokenizer"] = open_tokenizer(hostile)
    with Served(own, ServeOptions()) as served, served.http() as client:
        asked = {"model": "tiny", "max_tokens": 1, "prompt": "q" * 50}
        refused = client.post("/v1/completions", json=asked)
        assert refused.status_code == 400
        assert "tokenizer cannot take this text" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json={**asked, "prompt": "b"}).status_code == 200


class PanicException(BaseException):
    """As what the library raises for a mistake of its own, which is no Exception."""


def test_a_panic_while_a_text_is_decoded_costs_one_request_and_not_the_engine(own: Model) -> None:
    class Panics:
        def decode(self, *_: Any, **__: Any) -> str:
            raise PanicException("index out of bounds")

        def __getattr__(self, name: str) -> Any:
            return getattr(here, name)

    tokenizer: Any = own.tokenizer
    assert isinstance(tokenizer, SandboxTokenizer)
    here = tokenizer._here
    with Served(own, ServeOptions()) as served:
        tokenizer._here = Panics()
        failed = chat(served, MESSAGES[0]["content"])
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "damaged_model")
        tokenizer._here = here
        assert chat(served, MESSAGES[0]["content"]).status_code == 200
        assert served.scheduler.usable

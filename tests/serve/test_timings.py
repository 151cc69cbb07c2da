"""How fast an answer was made and what its steps read, in the answer and in its stream."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served

from sparsepack.loading import Model
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve import batch
from sparsepack.serve.options import ServeOptions

BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}


@pytest.fixture
def alone(model: Model) -> Iterator[Served]:
    """A server whose engine has counted nothing but what a test asks for."""
    with Served(model, ServeOptions()) as running:
        yield running


def chunks(served: Served, **more: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    with served.http() as http:
        lines = http.post("/v1/completions", json={**BODY, "stream": True, **more}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_an_answer_says_what_it_skipped_as_generate_does(alone: Served, model: Model) -> None:
    with alone.http() as http:
        timings = http.post("/v1/completions", json=BODY).json()["timings"]
    made = model.generate(BODY["prompt"], GenerateOptions(tokens=30, temperature=0)).result()
    assert made.skipped is not None
    assert 0 < made.skipped.overall < 1
    assert timings["skipped"] == pytest.approx(made.skipped.overall, abs=1e-4)
    assert timings["bits_read"] == pytest.approx(4.5 * (1 - made.skipped.overall), abs=1e-3)
    assert (timings["prompt_n"], timings["predicted_n"]) == (made.prompt_tokens, 30)
    assert timings["predicted_per_second"] == pytest.approx(29e3 / timings["predicted_ms"], rel=1e-3)


def test_a_stream_has_timings_in_its_last_chunks_and_on_request_in_all(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    *pieces, last, usage = chunks(served, stream_options={"include_usage": True})
    assert not any("timings" in piece for piece in pieces)
    assert last["timings"] == usage["timings"]
    assert last["timings"]["predicted_n"] == 30
    monkeypatch.setattr(batch, "COUNT_EVERY", 0.0)
    pieces = chunks(served, timings_per_token=True)
    counts = [piece["timings"]["predicted_n"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[0] < 5
    assert pieces[len(pieces) // 2]["timings"]["skipped"] > 0, "it is counted while the text is made"


def test_a_text_of_one_token_has_no_speed(served: Served) -> None:
    (timings,) = (piece["timings"] for piece in chunks(served, max_tokens=1) if "timings" in piece)
    assert (timings["predicted_n"], timings["predicted_per_second"], timings["skipped"]) == (1, None, None)

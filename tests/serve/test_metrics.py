"""What the server counts for Prometheus."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import Served, tiny_model, wait_until

from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.loading import Model
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.sites import SiteRule
from sparsepack.serve.options import ServeOptions


def completion(served: Served, **asked: Any) -> Any:
    """What a server answers to a short prompt, greedily: a drawn token may be the one that ends the text."""
    return served.client().completions.create(
        **{"model": "tiny", "prompt": "There was a king who had", "max_tokens": 7, "temperature": 0, **asked}
    )


def test_metrics_count_requests_texts_and_tokens(model: Model) -> None:
    with Served(model, ServeOptions()) as fresh, fresh.http() as http:
        answer = completion(fresh)
        with pytest.raises(openai.BadRequestError):
            completion(fresh, n=0)
        found = http.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if not line.startswith("#"))
        assert lines['sparsepack_requests_total{path="/v1/completions",status="200"}'] == "1.0"
        assert lines['sparsepack_requests_total{path="/v1/completions",status="400"}'] == "1.0"
        assert float(lines["sparsepack_completion_tokens_total"]) == 7
        assert float(lines["sparsepack_prompt_tokens_total"]) == answer.usage.prompt_tokens
        assert lines['sparsepack_texts_total{reason="length"}'] == "1.0"
        assert lines["sparsepack_first_piece_seconds_count"] == lines["sparsepack_text_seconds_count"] == "1.0"
        assert lines["sparsepack_texts_making"] == lines["sparsepack_texts_waiting"] == "0.0"


def texts_by_reason(served: Served) -> dict[str, float]:
    """How many texts ended, by why they did."""
    with served.http() as http:
        found = re.findall(r'^sparsepack_texts_total{reason="(.*)"} (.*)$', http.get("/metrics").text, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


@pytest.mark.parametrize("stream", [True, False])
def test_metrics_count_texts_that_failed(model: Model, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with Served(model, ServeOptions()) as fresh:
        completion(fresh)
        monkeypatch.setattr(model.engine, "decode_all", lambda *_: 1 / 0)
        with pytest.raises(openai.APIError, match="could not be made"):
            list(completion(fresh, n=3, stream=stream))
        wait_until(lambda: texts_by_reason(fresh) == {"length": 1, "failed": 1, "cancelled": 2})


@pytest.mark.parametrize("stream", [True, False])
def test_metrics_count_texts_that_were_cancelled_and_those_that_the_end_refused(model: Model, stream: bool) -> None:
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 900, "temperature": 0}
    with Served(model, ServeOptions()) as fresh:
        body = json.dumps({**asked, "n": 2, "stream": stream})
        with fresh.held():
            with socket.create_connection(("127.0.0.1", fresh.port)) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
                wait_until(lambda: fresh.scheduler.running == 2)
            wait_until(fresh.given_up)
        wait_until(lambda: texts_by_reason(fresh) == {"cancelled": 2})
        with ThreadPoolExecutor(1) as other, fresh.http() as http:
            with fresh.held():
                answer = other.submit(http.post, "/v1/completions", json=asked)
                wait_until(lambda: fresh.scheduler.busy)
                fresh.scheduler.abort()
            assert answer.result(60).status_code == 503
        wait_until(lambda: texts_by_reason(fresh) == {"cancelled": 2, "refused": 1})


def test_metrics_count_what_the_server_failed_at(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(model, ServeOptions()) as fresh:
        monkeypatch.setattr(fresh.service, "_run_in_thread", lambda *_: 1 / 0)
        with fresh.http() as http:  # whose connection ends with the failure
            assert http.post("/v1/completions", json={"model": "tiny"}).status_code == 500
        with fresh.http() as http:
            found = http.get("/metrics").text
        assert 'requests_total{path="/v1/completions",status="500"} 1.0' in found


def test_the_documentation_names_every_metric(served: Served) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    with served.http() as http:
        found = http.get("/metrics").text
    names = {line.split()[2] for line in found.splitlines() if line.startswith("# TYPE")}
    assert len(names) > 5
    assert {name for name in names if not name.endswith("_created") and f"`{name}`" not in text} == set()


def test_what_texts_of_a_model_with_planes_read_is_told(tmp_path: Path) -> None:
    """Beside the target, and in place of nothing for the models of other tests."""
    checkpoint = open_checkpoint("shipped:tiny")
    steps = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0])
    widths = {site: checkpoint.stacked_shape(site)[1] for site in SITES}
    rules = {
        (n, site): SiteRule(torch.full((widths[site],), 0.01), sparsity=0.4, steps=steps)
        for n in range(3)
        for site in SITES
    }
    FORMATS["zigzag-q6_p"].plan(checkpoint, PlanRequest(rules)).write(tmp_path / "m.gguf")
    planes = tiny_model(tmp_path / "m.gguf", backend="reference")
    with Served(planes, ServeOptions()) as served, served.http() as http:
        bits = http.get("/v1/models").json()["data"][0]["sparsepack"]["bits"]
        assert bits["stored"] == FORMATS["zigzag-q6_p"].bits
        assert "sparsepack_bits_read NaN" in http.get("/metrics").text
        completion(served)
        found = re.search(r"^sparsepack_bits_read (.*)$", http.get("/metrics").text, re.MULTILINE)
    assert found
    assert 0.5 < float(found[1]) < 6.2


def test_models_without_planes_have_no_count_of_bits(model: Model) -> None:
    with Served(model, ServeOptions()) as served, served.http() as http:
        assert "bits_read" not in http.get("/metrics").text

"""Who is let in, and how much may be sent."""

import socket
from collections.abc import Iterator

import openai
import pytest
from serving import Served, wait_until

from sparsepack.loading import Model
from sparsepack.serve import guards
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prepare import Prompts

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 1}
NO_NAMES = ["localhost:80@evil.com", "localhost:80:80", "[::1]evil.com", "[::1", "localhost:8a"]


@pytest.fixture(scope="module")
def locked(model: Model) -> Iterator[Served]:
    with Served(
        model, ServeOptions(api_keys=("secret", "other secret"), cors_origins=("https://example.org",))
    ) as running:
        yield running


def error(response: object) -> str:
    """The message of an answer in the form of OpenAI's errors."""
    found = response.json()["error"]  # type: ignore[attr-defined]
    assert set(found) == {"message", "type", "param", "code"}
    return str(found["message"])


def test_the_key_is_asked_for_everywhere_but_for_health(locked: Served) -> None:
    with locked.http() as http:
        assert http.get("/health").json() == {"status": "ok", "making": 0, "waiting": 0, "model": "tiny"}
        for path in ("/v1/models", "/v1/models/tiny", "/nothing", "/health/"):
            assert http.get(path).status_code == 401, path
        for key in (
            "Bearer wrong",
            "Bearer secre",
            "Bearer secrets",
            "Bearer",
            "secret",
            "Basic secret",
            "Bearer sécret",
        ):
            answer = http.post("/v1/completions", json=BODY, headers={"Authorization": key.encode()})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "the key in it is none of this server's" in error(answer)
            assert "secret" not in error(answer)
        assert http.post("/v1/completions", json=BODY, headers={"Authorization": "bearer secret"}).status_code == 200
    assert locked.client().models.list().data
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key="other").models.list()


def test_the_key_may_come_as_anthropics_clients_send_it(locked: Served) -> None:
    with locked.http() as http:
        assert http.get("/v1/models", headers={"x-api-key": "other secret"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401


def cached(served: Served, key: str, **parameters: object) -> int:
    """How many tokens of a prompt were computed before."""
    body = {"model": "tiny", "prompt": [7] * 96, "max_tokens": 1, **parameters}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_is_shared_by_requests_with_the_same_key_and_salt_alone(locked: Served) -> None:
    assert cached(locked, "secret") == 0
    assert cached(locked, "other secret") == 0
    assert cached(locked, "secret", cache_salt="mine") == 0
    assert cached(locked, "secret", cache_salt="mine") == 64
    assert cached(locked, "secret") == 64
    assert cached(locked, "other secret") == 64


def test_a_stored_response_is_found_with_its_own_key_alone(locked: Served) -> None:
    with locked.http() as http:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("secret", "other secret"))
        body = {"model": "tiny", "input": "x", "max_output_tokens": 1}
        id = http.post("/v1/responses", json=body, headers=mine).json()["id"]
        assert http.get(f"/v1/responses/{id}", headers=other).status_code == 404
        assert http.post("/v1/responses", json={**body, "previous_response_id": id}, headers=other).status_code == 404
        assert http.get(f"/v1/responses/{id}", headers=mine).status_code == 200


def test_without_a_prefix_cache_nothing_is_shared_but_within_a_request(model: Model) -> None:
    with Served(model, ServeOptions(prefix_cache="off")) as running:
        assert [cached(running, "none"), cached(running, "none")] == [0, 0]


def test_web_pages_of_other_origins_may_not_ask(served: Served, locked: Served) -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    with served.http() as http:
        answer = http.options("/v1/completions", headers={"Origin": "https://example.org", **preflight})
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers
        # A page may send a form's content types unasked: they are refused.
        plain = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
        assert plain.status_code == 415
        assert "expected application/json" in error(plain)
    with locked.http() as http:
        answer = http.options("/v1/completions", headers={"Origin": "https://example.org", **preflight})
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        other = http.options("/v1/completions", headers={"Origin": "https://example.com", **preflight})
        assert "access-control-allow-origin" not in other.headers
        refused = http.get("/v1/models", headers={"Origin": "https://example.org"})
        assert refused.headers["access-control-allow-origin"] == "https://example.org", "a page can read why"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "localhost.evil.example", "[::2]:80", *NO_NAMES]
)
def test_a_name_that_leads_here_is_not_this_server_s(served: Served, locked: Served, host: str) -> None:
    with served.http() as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == 403
    key = {"Authorization": "Bearer secret"}
    with locked.http(headers=key) as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_its_own_names_are(served: Served, host: str) -> None:
    with served.http() as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(served: Served) -> None:
    large = b'{"prompt": "' + b"x" * guards.MAX_BODY_BYTES + b'"}'
    served_most = Prompts(served.model).max_body_bytes
    with served.http(headers={"Content-Type": "application/json"}) as http:
        said = http.post("/v1/completions", content=large)
        assert said.status_code == 413
        assert f"larger than {served_most:,} bytes" in error(said)
        in_pieces = http.post("/v1/completions", content=(large[at : at + 65536] for at in range(0, len(large), 65536)))
        assert in_pieces.status_code == 413


def test_large_bodies_take_a_bounded_memory_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_LARGE_BODY_BYTES", 100_000)
    most = served.service.prompts.max_body_bytes
    body = b'{"n": 99, "user": "' + b"x" * 150_000 + b'"}'
    assert len(body) < most
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        wait_until(lambda: served.service._large_bodies._bytes > 80_000)
        with served.http(headers={"Content-Type": "application/json"}) as http:
            refused = http.post("/v1/completions", content=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "other large requests" in error(refused)
            small = http.post("/v1/completions", json={"n": 99, "user": "x" * 50_000})
            assert small.status_code == 400
    wait_until(lambda: served.service._large_bodies._bytes == 0)
    with served.http(headers={"Content-Type": "application/json"}) as http:
        assert http.post("/v1/completions", content=body).status_code == 400


def test_a_body_that_does_not_arrive_is_not_waited_for(model: Model) -> None:
    with Served(model, ServeOptions(receive_timeout=1)) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 100\r\n\r\n{")
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: served.connections() == 0)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/index", 404), ("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
)
def test_other_ways_lead_to_an_error_in_the_same_form(served: Served, method: str, path: str, status: int) -> None:
    with served.http() as http:
        answer = http.request(method, path)
        assert answer.status_code == status
        assert path in error(answer)

"""Connections that send nothing, or a byte now and then, keep nobody out."""

import asyncio
import errno
import itertools
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from serving import Served, stalled_stream, wait_until

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.serve import connections
from sparsepack.serve.connections import OncePerSecond, Quiet, loop_exception_handler, max_connections
from sparsepack.serve.options import ServeOptions

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WAYS = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": POST + b"Content-Length: 100\r\n\r\n{",
    "a body that is not read": HEAD + b"Content-Length: 100\r\n\r\n{",
    "kept alive": HEAD + b"\r\n",
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
}


@contextmanager
def clients(served: Served, count: int, says: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30)))
            made[-1].sendall(says)
        yield made


def closed(client: socket.socket, seconds: float = 30) -> bool:
    """Whether the server has closed a connection, once what it sent is read."""
    client.settimeout(seconds)
    try:
        while client.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(scope="module")
def small(model: Model) -> Iterator[Served]:
    with Served(model, ServeOptions(connections=20)) as running:
        yield running


@pytest.mark.parametrize("says", WAYS.values(), ids=WAYS)
def test_connections_that_wait_give_way_to_a_request(small: Served, says: bytes) -> None:
    with clients(small, 60, says) as idle:
        wait_until(lambda: small.connections() <= 20)
        for _ in range(3):
            with small.http() as client:
                assert client.get("/health", timeout=10).json()["status"] == "ok"
        assert closed(idle[0])
        assert len(small.service.connections) <= 20
    wait_until(lambda: len(small.service.connections) == 0)


def test_an_answer_on_its_way_never_gives_way(small: Served) -> None:
    steps = itertools.count()
    with small.held(lambda: next(steps) > 8), stalled_stream(small, 300) as reader:
        reader.settimeout(30)
        assert reader.recv(20).startswith(b"HTTP/1.1 200")
        with clients(small, 60, b""), small.http() as client:
            assert client.get("/health", timeout=10).status_code == 200
            assert not closed(reader, 0.2)


def test_more_answers_than_leave_connections_for_others_are_refused(model: Model) -> None:
    with Served(model, ServeOptions(connections=10)) as served, ExitStack() as stack, served.held():
        body = {"model": "tiny", "prompt": "x", "stream": True}
        for _ in range(served.service.connections.answers):
            client = stack.enter_context(served.http())
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        with served.http() as client:
            refused = client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get("/health", timeout=10).status_code == 200
        stack.close()


@pytest.mark.parametrize(
    "says",
    [
        *(pytest.param(says, marks=pytest.mark.long) for says in (b"", WAYS["a body that is not read"])),
        *(HEAD, POST + b"Content-Length: 100\r\n\r\n{"),
    ],
)
def test_a_request_that_comes_byte_by_byte_has_a_time(model: Model, says: bytes) -> None:
    with Served(model, ServeOptions(receive_timeout=1)) as served, clients(served, 1, says) as (client,):
        end = time.monotonic() + 30
        with pytest.raises(OSError):  # noqa: PT011 (the kind depends on when the server closes)
            while time.monotonic() < end:
                client.sendall(b"x")
                time.sleep(0.1)
        wait_until(lambda: len(served.service.connections) == 0)


def test_a_pause_between_two_requests_of_a_connection_is_no_part_of_a_head(model: Model) -> None:
    with Served(model, ServeOptions(receive_timeout=1)) as served, served.http() as client:
        for _ in range(2):
            answer = client.get("/health")
            assert answer.status_code == 200
            time.sleep(1.3)
        assert len(served.service.connections) == 1


def test_the_limit_leaves_descriptors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.os, "listdir", lambda _: [])
    for soft, most in ((256, 208), (100_000, 1024), (50, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_connections(None) == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with pytest.raises(UserError, match=r"--connections 5000: .* at most 952"):
        max_connections(5000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections(5000) == 5000


def test_what_happens_often_is_said_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    # Of this module alone: an event loop whose clock goes back sleeps for as long.
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    said: list[str] = []
    once = OncePerSecond(said.append)
    for _ in range(500):
        once("full")
    now += 1.5
    once("full")
    assert said == ["full", "full (500 times)"]
    quiet, record = Quiet(), logging.makeLogRecord({"levelno": logging.WARNING, "msg": "Invalid"})
    assert [quiet.filter(record) for _ in range(3)] == [True, False, False]
    assert quiet.filter(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "Invalid"}))


def test_a_loop_without_descriptors_says_so_once_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    handle, loop = loop_exception_handler(), asyncio.new_event_loop()
    for _ in range(50):
        handle(loop, {"message": "out of system resource", "exception": OSError(errno.EMFILE, "Too many open files")})
    handle(loop, {"message": "something else"})
    loop.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "Too many open files" in lines[0]
    assert "something else" in lines[1]

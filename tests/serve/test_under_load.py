"""Many clients at once, slow ones, and ones that go: everybody else is served, and nothing is left behind."""

import asyncio
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
from serving import Served, stalled_stream, wait_until

from sparsepack.loading import Model
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.batch import PREFILLED_BETWEEN_TOKENS
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.ticket import Ticket

ASKED = {"model": "tiny", "max_tokens": 12, "temperature": 0}
LONG = 900


@pytest.fixture
def fresh(model: Model) -> Iterator[Served]:
    """A server of one test's own, which leaves nothing behind."""
    with _leaving_nothing(model) as running:
        yield running


@contextmanager
def _leaving_nothing(model: Model) -> Iterator[Served]:
    threads = threading.active_count()
    with Served(model, ServeOptions()) as running:
        yield running
        running.close_clients()
        wait_until(lambda: running.idle() and running.connections() == 0)
        wait_until(lambda: running.tasks() <= 2, 10)
    wait_until(lambda: threading.active_count() <= threads)
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Ticket]


@pytest.fixture
def fresh_dense(dense: Model) -> Iterator[Served]:
    """A server of a model that skips nothing, so that a text does not depend on the texts beside it."""
    with _leaving_nothing(dense) as running:
        yield running


@pytest.mark.parametrize("clients", [24, pytest.param(100, marks=pytest.mark.long)])
def test_many_clients_at_once_get_each_its_own_text(fresh_dense: Served, clients: int) -> None:
    fresh, prompts = fresh_dense, [f"There were {n} kings who had" for n in range(clients)]
    expected = [fresh.model.generate(prompt, GenerateOptions(tokens=12)).result().text for prompt in prompts]

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        asked = {**ASKED, "prompt": prompts[number]}
        if number % 2:
            return str((await client.completions.create(**asked)).choices[0].text)
        pieces = [piece async for piece in await client.completions.create(**asked, stream=True)]
        return "".join(piece.choices[0].text for piece in pieces)

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, n) for n in range(clients)))

    assert asyncio.run(all_at_once()) == expected


def test_streams_go_on_while_a_long_prompt_is_read(fresh: Served) -> None:
    ids = [
        0,
        *fresh.model.tokenizer.encode("There was a king who had three sons. " * 120, add_special_tokens=False).ids,
    ][:900]
    client, positions = fresh.client(), list[int]()

    def waits_for_the_prompt() -> bool:
        stream, *prompt = fresh.texts._running
        position = fresh.model.engine.positions[stream.slot]
        if prompt:
            positions.append(position)
        return not prompt and position > 8

    streamed = {**ASKED, "max_tokens": 900, "prompt": "Once", "stream": True}
    with fresh.held(waits_for_the_prompt), client.completions.create(**streamed) as stream:
        next(iter(stream))
        long = client.completions.create(**{**ASKED, "max_tokens": 1}, prompt=ids)
        assert long.choices[0].finish_reason == "length"
    made = positions[-1] - positions[0]
    assert made >= 900 // PREFILLED_BETWEEN_TOKENS, "a token between any two pieces of the prompt"


def test_a_client_with_many_requests_does_not_keep_another_address_waiting(fresh: Served) -> None:
    def ask(http: httpx.Client) -> None:
        assert http.post("/v1/completions", json={**ASKED, "max_tokens": 60, "prompt": "Once"}).status_code == 200

    joined, join = list[str](), fresh.texts.join

    def observed(ticket: Any) -> None:
        joined.append(ticket.client.split()[-1])
        join(ticket)

    fresh.texts.join = observed  # type: ignore[method-assign]
    greedy, other = (fresh.http(transport=httpx.HTTPTransport(local_address=f"127.0.0.{n}")) for n in (2, 3))
    with greedy, other, ThreadPoolExecutor(61) as at_once:
        with fresh.held():
            asked = [at_once.submit(ask, greedy) for _ in range(60)]
            wait_until(lambda: fresh.scheduler.running + fresh.scheduler.waiting == 60)
            asked.append(at_once.submit(ask, other))
            wait_until(lambda: fresh.scheduler.running + fresh.scheduler.waiting == 61)
        for one in asked:
            one.result(60)
    assert joined.index("127.0.0.3") <= len(fresh.model.engine.positions) + 1, "behind those in the making and one more"


def test_a_full_queue_refuses_with_the_time_to_wait_and_a_client_that_tries_again_is_served(model: Model) -> None:
    with Served(model, ServeOptions(queue=1)) as served, ThreadPoolExecutor(1) as other, served.http() as http:
        hasty, patient = served.client(), served.client(max_retries=10)
        with served.held(), ExitStack() as streams:
            for _ in range(len(model.engine.positions) + 1):
                streams.enter_context(stalled_stream(served, LONG))
            wait_until(
                lambda: served.scheduler.running == len(model.engine.positions) and served.scheduler.waiting == 1
            )
            refused = http.post("/v1/completions", json={**ASKED, "prompt": "x"})
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "queue_full"
            with pytest.raises(openai.InternalServerError, match="the queue is full; try again in"):
                hasty.completions.create(**ASKED, prompt="x")
            served_later = other.submit(patient.completions.create, **ASKED, prompt="x")
        assert served_later.result(60).choices[0].text


def test_a_reader_that_stalls_keeps_nobody_waiting_and_gets_all_once_it_reads(fresh: Served) -> None:
    with ExitStack() as open_until_the_end:
        with fresh.held():
            slow = open_until_the_end.enter_context(stalled_stream(fresh, LONG))
            wait_until(lambda: fresh.scheduler.busy)
        assert fresh.client().completions.create(**ASKED, prompt="x").choices[0].text
        wait_until(fresh.idle)  # the slow one's text is made as well
        assert fresh.tasks() > 2, "it waits to be sent"
        received = b""
        slow.settimeout(20)
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and (part := slow.recv(65536)):
            received += part
        assert received.count(b'"finish_reason":null') > LONG // 4
        assert b"data: [DONE]" in received


def test_a_reader_that_takes_nothing_for_too_long_is_dropped(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    with Served(model, ServeOptions(send_timeout=1)) as served, ExitStack() as streams:
        with served.held():
            streams.enter_context(stalled_stream(served, LONG))
            wait_until(lambda: served.scheduler.busy)
        wait_until(served.idle)
        wait_until(lambda: served.tasks() <= 2)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            wait_until(lambda: served.connections() == 0)
    assert capsys.readouterr().err.count("the client took nothing for 1 s") <= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_the_engine_at_once(fresh: Served, stream: bool) -> None:
    body = json.dumps({**ASKED, "max_tokens": 1000, "prompt": "Once", "stream": stream})
    begun, gone, turns = threading.Event(), threading.Event(), list[bool]()

    def waits_for_the_client_to_go() -> bool:
        turns.append(gone.is_set())
        if any(fresh.model.engine.positions[text.slot] > 20 for text in fresh.texts._running):
            begun.set()
        return begun.is_set() and not gone.is_set()

    with fresh.held(waits_for_the_client_to_go):
        with socket.create_connection(("127.0.0.1", fresh.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            assert begun.wait(30)
        wait_until(fresh.given_up)
        gone.set()
        wait_until(fresh.idle)
        assert turns.count(True) == 1, "the turn that frees it"
    assert fresh.client().completions.create(**ASKED, prompt="x").choices[0].text


def test_clients_that_go_in_mid_stream_or_from_the_queue_leave_the_others_alone(
    fresh_dense: Served, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = fresh_dense
    expected = fresh.model.generate("There was", GenerateOptions(tokens=12)).result().text

    async def go(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(**{**ASKED, "max_tokens": 500}, prompt="Once", stream=True)
        async for _ in stream:
            break
        await stream.close()

    async def give_up(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(**{**ASKED, "max_tokens": 900}, prompt="Once", timeout=0.3)

    async def stay(client: openai.AsyncOpenAI) -> str:
        return str((await client.completions.create(**ASKED, prompt="There was")).choices[0].text)

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            with fresh.held():  # nobody gets a text before it is given up
                leaving = [asyncio.create_task(what(client)) for _ in range(20) for what in (go, give_up)]
                staying = [asyncio.create_task(stay(client)) for _ in range(20)]
                await asyncio.gather(*leaving[1::2])
            await asyncio.gather(*leaving[::2])
            return await asyncio.gather(*staying)

    assert asyncio.run(all_at_once()) == [expected] * 20
    assert "socket.send() raised" not in caplog.text, "nothing is sent to clients that went"


def test_health_answers_while_a_text_is_made(fresh: Served) -> None:
    with fresh.held(), stalled_stream(fresh, LONG), fresh.http() as http:
        wait_until(lambda: fresh.scheduler.busy)
        assert http.get("/health").json()["making"] == 1


@pytest.mark.long
def test_many_requests_leave_memory_and_files_as_they_were(fresh: Served) -> None:
    process = psutil.Process(os.getpid())

    def ask(count: int) -> tuple[int, int]:
        with fresh.http() as http:
            for number in range(count):
                asked = {**ASKED, "max_tokens": 2, "prompt": "x", "stream": bool(number % 2)}
                assert http.post("/v1/completions", json=asked).status_code == 200
                assert http.post("/v1/completions", json={"n": 99}).status_code == 400
        wait_until(lambda: fresh.connections() == 0)
        gc.collect()
        return process.memory_info().rss, process.num_fds()

    ask(50)
    memory, files = ask(50)
    later, _ = ask(300)
    wait_until(lambda: process.num_fds() <= files)
    assert later - memory < 8 * 2**20, "28 thousand bytes for each text"

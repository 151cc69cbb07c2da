"""A served model within the test's process, so that a test sees its threads, its tasks and its engine."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from sparsepack.loading import Model, load
from sparsepack.serve.app import Service
from sparsepack.serve.batch import ContinuousBatch
from sparsepack.serve.connections import LISTEN_BACKLOG
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prepare import Prompts
from sparsepack.serve.scheduler import Scheduler
from sparsepack.serve.server import bind_socket, uvicorn_config

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"

MESSAGES = [{"role": "user", "content": "Who was there?"}]


def _never() -> bool:
    return False


class Served:
    """A server that listens on 127.0.0.1, and what a test wants to know of it."""

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model, self.options = model, options
        self._clients: list[openai.OpenAI] = []
        self.texts = ContinuousBatch(model)
        self._advance, self._stays = self.texts.advance, _never
        self.texts.advance = self._turn  # type: ignore[method-assign]
        self.scheduler = Scheduler(self.texts, options.queue)
        self._socket = bind_socket(options.host, 0, options.send_timeout)
        # What the system keeps for a client that does not read would be the whole of a tiny model's text.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = Service(self.scheduler, Prompts(model), options, options.model_name or "tiny", "fp_test")
        self._server = uvicorn.Server(uvicorn_config(self.service))
        self._thread = threading.Thread(target=self._run, name="test-server")

    def _turn(self) -> None:
        if self._stays():
            time.sleep(0.005)
        else:
            self._advance()

    @contextmanager
    def held(self, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Within, texts begin, but from when that is true no more is made of any: whoever looks finds them in the
        making, though other processes hold the cores. It is asked in the engine's thread."""
        self._stays = when
        try:
            yield
        finally:
            self._stays = _never

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(0.1, self._socket.listen, LISTEN_BACKLOG)
        await self._server.serve([self._socket])

    def __enter__(self) -> "Served":
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.scheduler.close(30)

    def client(self, **settings: object) -> openai.OpenAI:
        """The official client, which does not try again."""
        settings = {"api_key": next(iter(self.options.api_keys), "none"), "max_retries": 0, "timeout": 120, **settings}
        made = openai.OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]
        self._clients.append(made)
        return made

    def close_clients(self) -> None:
        """Close what the clients keep open."""
        for client in self._clients:
            client.close()

    def http(self, **settings: object) -> httpx.Client:
        """A client that says what the test says."""
        return httpx.Client(base_url=self.url, timeout=60, **settings)  # type: ignore[arg-type]

    def tasks(self) -> int:
        """Tasks of the event loop, uvicorn's own included."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(10)

    def connections(self) -> int:
        """Connections that the server has open."""
        return len(self._server.server_state.connections)

    def given_up(self) -> bool:
        """Whether nobody wants any of the texts in the making."""
        return bool(self.texts.tickets) and all(wanted.cancelled for wanted in self.texts.tickets)

    def idle(self) -> bool:
        """Whether no text is made or waits."""
        return not self.scheduler.busy and not self.scheduler.waiting


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def tiny_model(path: Path, **options: object) -> Model:
    """The packed tiny model with a template for chats, which it does not bring, as `sparsepack serve` loads it."""
    return replace(load(path, sequences=None, **options), chat_template=TEMPLATE)


@contextmanager
def stalled_stream(served: Served, tokens: int, buffer: int = 4096) -> Iterator[socket.socket]:
    """A client that asks for a stream and takes nothing of it, on a socket that holds little."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(("127.0.0.1", served.port))
        # Greedily, since a text that is sampled may end after a few tokens.
        body = f'{{"model": "tiny", "prompt": "Once", "max_tokens": {tokens}, "temperature": 0, "stream": true}}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        yield client


def chat(served: Served, **asked: Any) -> Any:
    """What a server answers to a short chat."""
    messages = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16}
    return served.client().chat.completions.create(**{**messages, **asked})


def server_sent_events(stream: str) -> list[tuple[str, Any]]:
    """The events of a stream: their names and their data."""
    blocks = [block.split("\n") for block in stream.split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]

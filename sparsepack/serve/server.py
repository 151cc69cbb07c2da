"""The server process: its socket, signals, and the end."""

import asyncio
import gc
import hashlib
import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from types import FrameType

import uvicorn

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.sandbox import SANDBOX
from sparsepack.progress import say
from sparsepack.serve.app import Service, create_app
from sparsepack.serve.batch import ContinuousBatch
from sparsepack.serve.connections import (
    ACCEPTED_AT_ONCE,
    LISTEN_BACKLOG,
    Quiet,
    limited_protocol,
    loop_exception_handler,
)
from sparsepack.serve.guards import LOOPBACK
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prepare import Prompts
from sparsepack.serve.scheduler import Scheduler


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Let the garbage collector leave alone what is there already: the model, and what was imported. A full collection
    would look at all of it every now and then, half a million objects; that takes a tenth of a second, in which no
    other thread runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


AFTER_GRACE = 3
"""Answers that were broken off are told so within this many seconds, before connections are cut."""


def bind_socket(host: str, port: int, stalled: float) -> socket.socket:
    """A socket of an address, which listens not yet: until then, clients are told that nobody is there.

    stalled -- seconds after which the system drops a connection whose other end takes nothing (Linux; elsewhere what
               was sent stays until that end goes)

    Raises `UserError` for an address that cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: no address of this machine ({error}); 127.0.0.1 always is one") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stalled * 1000))
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"{host}, port {port}: cannot listen there ({error.strerror}); give another --port") from error
    return listener


def serve(model: Model, default_name: str, options: ServeOptions, listening: socket.socket) -> None:
    """Serve a model on a socket until SIGINT or SIGTERM. Texts in the making then have `options.grace` seconds."""
    name = options.model_name or default_name
    model.engine.prepare()  # which the first request need not wait for
    with suppress(UserError):  # each chat says what is wrong with its template
        model.chat_prompt([{"role": "user", "content": "Hello"}])
    scheduler = Scheduler(ContinuousBatch(model), options.queue)
    try:
        server = _Server(Service(scheduler, Prompts(model), options, name, fingerprint(model)))
        with frozen_heap():
            asyncio.run(server.serve([listening]))
    finally:
        listening.close()
        scheduler.close(options.grace)


def fingerprint(model: Model) -> str:
    """What changes where the same request may get another answer: with the file, and with what runs it."""
    said = json.dumps([dict(model.packed.manifest), model.engine.description, model.engine.dense], default=str)
    return f"fp_{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def uvicorn_config(service: Service) -> uvicorn.Config:
    """How uvicorn runs the application: HTTP/1.1, a limited number of connections, and nothing said but warnings."""
    logging.getLogger("uvicorn.error").addFilter(_quiet)
    return uvicorn.Config(
        create_app(service),
        loop="asyncio",
        http=limited_protocol(service.connections),
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=ceil(service.options.grace) + AFTER_GRACE,
    )


_quiet = Quiet()


class _Server(uvicorn.Server):
    """uvicorn, which tells the scheduler when a signal comes, and ends without one."""

    def __init__(self, service: Service) -> None:
        super().__init__(uvicorn_config(service))
        self._signals = 0
        self._name, self._scheduler, self._options = service.name, service.scheduler, service.options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so: from then on clients are heard, and signals."""
        self._loop.set_exception_handler(loop_exception_handler())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(LISTEN_BACKLOG)
            host, port = listening.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            here = f"http://localhost:{port}" if host in ("0.0.0.0", "::") else url  # no browser opens "any address"
            say(f"chat in a browser: {here}/")
            say(f"{self._name} at {url}/v1; Ctrl-C ends it")
            if host not in LOOPBACK and not self._options.api_keys:
                say("note: whoever reaches this machine can use the model; give --api-key to let only some")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends on a signal, and leaves it at that: a server that was told to end and did has done its work."""
        self._loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            SANDBOX.reopen()  # for whoever called the server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, which may come while the scheduler is being asked something: hence later, in the loop.

        The first one lets texts come to their end, the second one breaks them off, and their clients are told so. The
        third one cuts connections, at which uvicorn would log each request that it cancels.
        """
        self._signals += 1
        if self._signals == 1:
            self.should_exit = True
            self._loop.call_soon_threadsafe(self._abort_texts)
        elif self._signals == 2:
            self._loop.call_soon_threadsafe(self._abort)
        else:
            logging.getLogger("uvicorn.error").disabled = True
            self.force_exit = True

    def _abort(self) -> None:
        say("interrupted again: texts in the making are broken off")
        self._scheduler.abort()

    def _abort_texts(self) -> None:
        self._scheduler.drain()
        SANDBOX.close()  # no prompt is made any more, however long its template or its tokenizer would take
        self._loop.call_later(self._options.grace, self._scheduler.abort)

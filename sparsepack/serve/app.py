"""The routes: from a request, checked, to its response."""

import asyncio
import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparsepack.serve.answer import Answer
from sparsepack.serve.connections import Connections, max_connections
from sparsepack.serve.delivery import Delivery, queue_full
from sparsepack.serve.guards import (
    CURRENT_KEY,
    LOOPBACK,
    MAX_JSON_VALUES,
    SMALL_BODY,
    Guard,
    LargeBodies,
    check_values,
    read_json_body,
)
from sparsepack.serve.metrics import Counting, Metrics
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.page.routes import page_routes
from sparsepack.serve.prepare import PreparedRequest, Prompts, RequestPreparer
from sparsepack.serve.protocols import PROTOCOLS, refusal_response
from sparsepack.serve.protocols.protocol import Endpoint, Query
from sparsepack.serve.protocols.stored_responses import StoredResponses
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.scheduler import ENDING, Closing, QueueFull, Scheduler
from sparsepack.serve.ticket import GenerationRequest, Ticket

ENDPOINTS = tuple(endpoint for protocol in PROTOCOLS for endpoint in protocol.endpoints)
QUERIES = tuple(query for protocol in PROTOCOLS for query in protocol.queries)
PATHS = frozenset(("/health", "/metrics", *(path for one in PROTOCOLS for path in one.paths)))

R = TypeVar("R")


class Service:
    """The routes of one model.

    name        -- of the model
    fingerprint -- changes with the model and what runs it
    created     -- seconds since 1970
    """

    options: ServeOptions

    def __init__(
        self, scheduler: Scheduler, prompts: Prompts, options: ServeOptions, name: str, fingerprint: str
    ) -> None:
        self.scheduler, self.prompts, self.options = scheduler, prompts, options
        self.name, self.fingerprint = name, fingerprint
        self.connections = Connections(max_connections(options.connections), options.receive_timeout)
        self.metrics = Metrics(
            running=lambda: scheduler.running,
            waiting=lambda: scheduler.waiting,
            bits_read=None if prompts.model.packed.plane_bits is None else lambda: scheduler.bits_read,
        )
        most = scheduler.capacity + options.queue
        self.preparer = RequestPreparer(prompts.model, prompts, name, most, options.strict, options.reasoning)
        self.stored_responses = StoredResponses()
        self.created = int(time.time())
        self._reading, self._large_bodies = 0, LargeBodies()
        self._one_large_body, self._beginning = asyncio.Lock(), asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """Whether texts are made: 200, or 503 where the server ends."""
        usable = self.scheduler.usable
        body = {"making": self.scheduler.running, "waiting": self.scheduler.waiting, "model": self.name}
        return JSONResponse({"status": "ok" if usable else "ending", **body}, 200 if usable else 503)

    async def prometheus(self, request: Request) -> Response:
        """What the server has done, for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def query(self, query: Query, request: Request) -> Response:
        """Answer without generating."""

        def answer(body: bytes) -> Any:
            check_values(body, MAX_JSON_VALUES)
            return query.answer(body, self, **request.path_params)

        if query.method != "POST":
            return JSONResponse(await asyncio.to_thread(answer, b""))
        return JSONResponse(await self._read(request, answer))

    async def generate(self, endpoint: Endpoint, request: Request) -> Any:
        """Generate the answer to a request."""
        received_at = time.monotonic()
        async with self._beginning:  # of many that come together one after the other, and others between them
            await asyncio.sleep(0)
        prepared = await self._read(request, partial(self._prepare, endpoint))
        key = CURRENT_KEY.get()
        client = f"{key} {request.client.host if request.client else ''}"
        answer = Answer(
            prepared.request,
            self.name,
            self.fingerprint,
            client,
            prompt_tokens=sum(len(each.ids) for each in prepared.sequences[:: prepared.request.n or 1]),
            bytes_of=self.prompts.bytes_of.of,
            parser=prepared.parser,
        )
        writer, stream = endpoint.writer(answer), bool(prepared.request.stream)
        domains = {"shared": key, "address": client, "off": answer.id}
        domain = f"{domains[self.options.prefix_cache]} {prepared.request.cache_salt or ''}"
        tickets = self._submit(prepared.sequences, client, domain)
        return Delivery(tickets, writer, stream, self.options.send_timeout, self.metrics, received_at)

    def _prepare(self, endpoint: Endpoint, body: bytes) -> PreparedRequest:
        check_values(body, MAX_JSON_VALUES + (self.prompts.context if endpoint.token_ids else 0))
        return self.preparer.prepare(endpoint.read(body, self))

    async def _read(self, request: Request, read: Callable[[bytes], R]) -> R:
        """What a function makes of a request's body, in a thread, while others are served. Raises `Refusal` where there
        are too many, or the server ends meanwhile."""
        with self._large_bodies.one() as grow:
            body = await read_json_body(request, self.prompts.max_body_bytes, self.options.receive_timeout, grow)
            self.connections.check_capacity()
            try:
                return await self._run_in_thread(body, read)
            except Refusal as error:
                if self.scheduler.usable:
                    raise
                raise Refusal(503, ENDING, code="server_ending") from error

    async def _run_in_thread(self, body: bytes, read: Callable[[bytes], R]) -> R:
        """A large body may take a second: only one is read at a time, and what it took is given back."""
        if self._reading > self.options.queue + self.scheduler.capacity:
            raise queue_full(QueueFull(1))
        self._reading += 1
        try:
            if len(body) <= SMALL_BODY:
                return await asyncio.to_thread(read, body)
            async with self._one_large_body:
                try:
                    return await asyncio.to_thread(read, body)
                finally:
                    del body
                    await asyncio.to_thread(release_memory)
        finally:
            self._reading -= 1

    def _submit(self, requests: Sequence[GenerationRequest], client: str, domain: str) -> list[Ticket]:
        """Put all of the texts of a request into the queue, or none."""
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(self.scheduler.submit(request, client, domain))
        except (QueueFull, Closing) as error:
            for ticket in tickets:
                ticket.cancel()
            if isinstance(error, QueueFull):
                raise queue_full(error) from error
            raise Refusal(503, str(error), code="server_ending") from error
        return tickets


def create_app(service: Service) -> Starlette:
    """The application, for an ASGI server."""
    options = service.options
    local = not options.api_keys and options.host in LOOPBACK
    middleware = [
        Middleware(Counting, metrics=service.metrics, paths=PATHS),
        Middleware(Guard, keys=options.api_keys, hosts=LOOPBACK if local else None, refuse=refusal_response),
    ]
    if options.cors_origins:  # outermost: a browser asks without the key whether it may ask
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            max_age=600,
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            *page_routes(),
            Route("/health", service.health),
            Route("/metrics", service.prometheus),
            *(Route(one.path, partial(service.generate, one), methods=["POST"]) for one in ENDPOINTS),
            *(Route(one.path, partial(service.query, one), methods=[one.method]) for one in QUERIES),
        ],
        middleware=middleware,
        exception_handlers={Refusal: _refused, HTTPException: _no_route, Exception: _failed},
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refusal_response(request.url.path, error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}; docs/serve.md says what there is"
    refusal = Refusal(error.status_code, what)
    response = refusal_response(request.url.path, refusal)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    refusal = Refusal(500, "the server failed; its log says why", code="internal_error")
    return refusal_response(request.url.path, refusal)


@cache
def _malloc_trim() -> Any:
    """Return glibc's `malloc_trim`; None in other C libraries."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of no name
        return None


def release_memory() -> None:
    """Return freed memory to the system. glibc keeps it for each thread otherwise: hundreds of MB after one long
    prompt. Takes milliseconds, in which other threads run."""
    if (trim := _malloc_trim()) is not None:
        trim(0)

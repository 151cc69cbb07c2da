"""The routes: what is asked, checked; what is answered."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.answers import CHAT, COMPLETION, Answer, Form
from sparsepack.serve.delivery import Delivery, queue_full
from sparsepack.serve.guards import LOOPBACK, MOST_VALUES, Guard, check_values, json_body, refused
from sparsepack.serve.memory import give_back_memory
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prompts import Prompts
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters, read_request
from sparsepack.serve.worker import Closing, QueueFull, TextRequest, TextWorker, Ticket

SMALL_BODY = 2**16
"""A body of at most this many bytes is read in milliseconds."""

R = TypeVar("R")


class Service:
    """The routes of one model.

    name        -- of the model
    fingerprint -- changes with the model and what runs it
    """

    def __init__(
        self, worker: TextWorker, prompts: Prompts, options: ServeOptions, name: str, fingerprint: str
    ) -> None:
        self.worker, self.prompts, self.options = worker, prompts, options
        self.name, self.fingerprint = name, fingerprint
        self._created = int(time.time())
        self._reading = 0
        self._one_large_body = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """Whether texts are made: 200, or 503 where the server ends."""
        usable = self.worker.usable
        body = {"making": self.worker.making, "waiting": self.worker.waiting, "model": self.name}
        return JSONResponse({"status": "ok" if usable else "ending", **body}, 200 if usable else 503)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model, asked for by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Any:
        """Continue a prompt."""
        return await self._delivery(COMPLETION, request, self._completion)

    async def chat_completions(self, request: Request) -> Any:
        """Answer the last message of a chat."""
        return await self._delivery(CHAT, request, self._chat)

    def _completion(self, body: bytes) -> tuple[CompletionRequest, list[int]]:
        """A request and the tokens of its prompt. Runs in a thread, as `_chat` does."""
        check_values(body, MOST_VALUES + self.prompts.context)
        asked = read_request(CompletionRequest, body)
        self._check_model(asked.model)
        return asked, self.prompts.plain(asked.text_or_ids)

    def _chat(self, body: bytes) -> tuple[ChatRequest, list[int]]:
        check_values(body, MOST_VALUES)
        asked = read_request(ChatRequest, body)
        self._check_model(asked.model)
        return asked, self.prompts.chat([message.for_template() for message in asked.messages])

    async def _delivery(
        self, form: Form, request: Request, read: Callable[[bytes], tuple[TextParameters, list[int]]]
    ) -> Delivery:
        asked, ids = await self._read(request, read)
        max_tokens = self.prompts.checked_tokens(len(ids), asked.most_tokens)
        client = request.client.host if request.client else ""
        ticket = self._submitted(TextRequest(tuple(ids), options_of(asked, max_tokens)), client)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        answer = Answer(form, self.name, self.fingerprint, len(ids), with_usage)
        return Delivery(ticket, answer, bool(asked.stream), self.options.send_timeout)

    async def _read(self, request: Request, read: Callable[[bytes], R]) -> R:
        """What a function makes of a request's body, in a thread, while others are served. A large body may take a
        second: only one is read at a time, and what it took is given back."""
        body = await json_body(request, self.prompts.most_body)
        if self._reading > self.options.queue + self.worker.together:
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
                    await asyncio.to_thread(give_back_memory)
        finally:
            self._reading -= 1

    def _submitted(self, request: TextRequest, client: str) -> Ticket:
        try:
            return self.worker.submit(request, client)
        except QueueFull as error:
            raise queue_full(error) from error
        except Closing as error:
            raise Refusal(503, str(error), code="server_ending") from error

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise Refusal(404, f"model {name!r}: this server has {self.name!r}", "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        common = {"id": self.name, "object": "model", "created": self._created, "owned_by": "sparsepack"}
        return {**common, "max_model_len": self.prompts.context}


def options_of(asked: TextParameters, tokens: int) -> GenerateOptions:
    """How tokens are chosen: as at OpenAI unless told otherwise, and by a new seed for each text."""
    return GenerateOptions(
        tokens=tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        stop=asked.stops,
    )


def create_app(service: Service) -> Starlette:
    """The application, for an ASGI server."""
    options = service.options
    local = options.api_key is None and options.host in LOOPBACK
    middleware = [Middleware(Guard, key=options.api_key, hosts=LOOPBACK if local else None)]
    if options.cors_origins:  # outermost: a browser asks without the key whether it may ask
        origins = list(options.cors_origins)
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={Refusal: _refused, HTTPException: _no_route, Exception: _failed},
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}; docs/serve.md says what there is"
    refusal = Refusal(error.status_code, what)
    response = refused(refusal)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return refused(Refusal(500, "the server failed; its log says why", code="internal_error"))

"""The routes: what is asked, checked; what is answered."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparsepack.runtime.sampling import Sampling
from sparsepack.serve.answers import CHAT, COMPLETION, Answer, Form
from sparsepack.serve.delivery import Delivery
from sparsepack.serve.guards import LOOPBACK, Guard, json_body, refused
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prompts import Prompts
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters, read_request
from sparsepack.serve.worker import Closing, QueueFull, TextRequest, Ticket, Worker


@dataclass(frozen=True)
class Service:
    """What the routes share.

    name        -- of the model
    fingerprint -- changes with the model and what runs it
    created     -- when the model was loaded, in seconds since 1970
    """

    worker: Worker
    prompts: Prompts
    options: ServeOptions
    name: str
    fingerprint: str
    created: int

    async def health(self, request: Request) -> Response:
        """Whether texts are made: 200, or 503 where the server ends."""
        usable = self.worker.usable
        body = {"status": "ok" if usable else "ending", "model": self.name}
        body |= {"making": int(self.worker.busy), "waiting": self.worker.waiting}
        return JSONResponse(body, 200 if usable else 503)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model, asked for by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Any:
        """Continue a prompt."""
        asked = read_request(CompletionRequest, await json_body(request))
        return await self._delivery(COMPLETION, asked, asked.most_tokens, lambda: self.prompts.plain(asked.text_or_ids))

    async def chat_completions(self, request: Request) -> Any:
        """Answer the last message of a chat."""
        asked = read_request(ChatRequest, await json_body(request))
        messages = [message.for_template() for message in asked.messages]
        return await self._delivery(CHAT, asked, asked.most_tokens, lambda: self.prompts.chat(messages))

    async def _delivery(
        self, form: Form, asked: TextParameters, most_tokens: int | None, prompt: Callable[[], list[int]]
    ) -> Delivery:
        self._check_model(asked.model)
        ids = await run_in_threadpool(prompt)  # a long prompt takes seconds, in which others are served
        max_tokens = self.prompts.checked_tokens(len(ids), most_tokens)
        ticket = self._submitted(TextRequest(tuple(ids), max_tokens, sampling_of(asked), asked.stops))
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        answer = Answer(form, self.name, self.fingerprint, len(ids), with_usage)
        return Delivery(ticket, answer, bool(asked.stream), self.options.send_timeout)

    def _submitted(self, request: TextRequest) -> Ticket:
        try:
            return self.worker.submit(request)
        except QueueFull as error:
            raise Refusal(503, str(error), code="queue_full", retry_after=error.seconds) from error
        except Closing as error:
            raise Refusal(503, str(error), code="server_ending") from error

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise Refusal(404, f"model {name!r}: this server has {self.name!r}", "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        common = {"id": self.name, "object": "model", "created": self.created, "owned_by": "sparsepack"}
        return {**common, "max_model_len": self.prompts.context}


def sampling_of(asked: TextParameters) -> Sampling:
    """How tokens are chosen: as OpenAI does unless told otherwise, by a new seed for each text."""
    return Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
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
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}; docs/serve.md has what there is")
    response = refused(refusal)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return refused(Refusal(500, "the server failed; its log says why", code="internal_error"))

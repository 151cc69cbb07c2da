"""A text on its way to a client, whole or as server-sent events; and what happens when the client goes or stalls."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sparsepack.errors import ArtifactError, UserError
from sparsepack.progress import say
from sparsepack.serve.answer import AnswerWriter, Choice
from sparsepack.serve.metrics import Metrics
from sparsepack.serve.protocols import refusal_response
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.scheduler import Closing, QueueFull
from sparsepack.serve.ticket import Event, Failure, Finish, TextDelta, Ticket

KEEP_ALIVE_SECONDS = 15.0
"""A stream that has had nothing to say for this many seconds shows that the stream lives."""

STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the events together
]


class _ClientGone(Exception):
    """Nobody reads the answer."""


@dataclass(frozen=True)
class Delivery:
    """The response to a request whose texts wait or are made.

    tickets      -- of the texts
    writer       -- writes the answer
    stream       -- in events, as the texts are made; or in one piece
    send_timeout -- seconds that the client has to take what is sent
    metrics      -- what counts them

    When the client goes, or stalls for so long, its texts are cancelled, and where one fails, the others, too.
    """

    tickets: Sequence[Ticket]
    writer: AnswerWriter
    stream: bool
    send_timeout: float
    metrics: Metrics
    received_at: float = field(default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.send_timeout):
                await send(message)

        watch = asyncio.create_task(self._cancel_when_gone(receive))
        answer = self.writer.answer
        choices = [Choice(n, answer.parser()) for n in range(len(self.tickets))]
        try:
            if self.stream:
                await self._send_events(choices, send_in_time)
            else:
                await self._send_whole(choices, scope, receive, send_in_time)
        except TimeoutError:
            say(f"{answer.id}: dropped, the client took nothing for {self.send_timeout:g} s")
        finally:
            watch.cancel()
            self._cancel()
            for choice in choices:
                if choice.end is None:
                    self.metrics.count_outcome(CANCELLED if choice.error is None else outcome_of(choice.error))

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()
        for ticket in self.tickets:
            ticket.put(Failure(_ClientGone()))

    def _cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    async def _send_whole(self, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send) -> None:
        async for n, event in _merge_events(self.tickets):
            match event:
                case TextDelta() | Finish():
                    self._add(choices[n], event)
                case Failure():
                    choices[n].error = event.error
                    if not isinstance(event.error, _ClientGone):
                        await refusal_response(scope["path"], refusal_for(event.error))(scope, receive, send)
                    return
        many = self.writer.answer.request.logprobs_count is not None  # megabytes take a while
        body = await asyncio.to_thread(self.writer.whole, choices) if many else self.writer.whole(choices)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_events(self, choices: Sequence[Choice], send: Send) -> None:
        headers = [(b"content-type", self.writer.content_type.encode()), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_more(send, self.writer.begin(choices))
        async for n, event in _merge_events(self.tickets, KEEP_ALIVE_SECONDS):
            match event:
                case None:
                    await _send_more(send, self.writer.keep_alive)
                case TextDelta() | Finish():
                    self._add(choices[n], event)
                    events = self.writer.delta(choices[n])
                    if all(choice.end for choice in choices):
                        events += self.writer.end(choices)
                    await _send_more(send, events)
                case Failure():
                    choices[n].error = event.error
                    if not isinstance(event.error, _ClientGone):
                        await _send_more(send, self.writer.failure(refusal_for(event.error)))
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _add(self, choice: Choice, event: TextDelta | Finish) -> None:
        """Take what came of a text, and count it."""
        if not choice.begun:
            self.metrics.count_first_delta(self.received_at)
        if isinstance(event, Finish):
            answer, prompt_tokens = self.writer.answer, len(self.tickets[choice.index].request.ids)
            self.metrics.count_finish(self.received_at, prompt_tokens, event)
            say(
                f"{answer.id}: {prompt_tokens} tokens, {event.cached} of them cached, "
                f"then {event.tokens} in {time.time() - answer.created:.1f} s ({event.reason})"
            )
        choice.add(event)


async def _merge_events(
    tickets: Sequence[Ticket], patience: float | None = None
) -> AsyncIterator[tuple[int, Event | None]]:
    """The events of several texts as they come, each with the number of its text; see `Ticket.events`."""
    if len(tickets) == 1:
        async for event in tickets[0].events(patience):
            yield 0, event
        return
    events: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()

    async def forward(n: int) -> None:
        async for event in tickets[n].events(patience):
            await events.put((n, event))

    forwarding = [asyncio.create_task(forward(n)) for n in range(len(tickets))]
    try:
        ended = 0
        while ended < len(tickets):
            n, event = await events.get()
            ended += isinstance(event, Finish | Failure)
            yield n, event
    finally:
        for task in forwarding:
            task.cancel()


def refusal_for(error: Exception) -> Refusal:
    """What the client is told of an error in a text. What it cannot know goes to the log alone."""
    if isinstance(error, Closing):
        return Refusal(503, str(error), code="server_ending")
    if isinstance(error, QueueFull):
        return queue_full(error)
    if isinstance(error, ArtifactError):
        return Refusal(500, str(error), code="damaged_model")
    if isinstance(error, UserError):
        return Refusal(400, str(error), code="invalid_value")
    logging.getLogger(__name__).error("a text failed", exc_info=error)
    return Refusal(500, "the text could not be made; the server's log says why", code="internal_error")


CANCELLED = "cancelled"


def outcome_of(error: Exception) -> str:
    """How a text with an error ended, as metrics count it."""
    if isinstance(error, _ClientGone):
        return CANCELLED
    return "refused" if isinstance(error, Closing | QueueFull) else "failed"


def queue_full(error: QueueFull) -> Refusal:
    """What the client is told whose text there is no place for."""
    return Refusal(503, str(error), code="queue_full", retry_after=error.seconds)


async def _send_more(send: Send, body: bytes) -> None:
    if not body:
        return
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(0)  # sending waits for nothing while there is room: let others go on, and see whether one went

"""A text on its way to a client, whole or as server-sent events; and what happens when the client goes or stalls."""

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from sparsepack.errors import ArtifactError
from sparsepack.progress import say
from sparsepack.serve.answers import END_OF_STREAM, STILL_THERE, Answer, server_sent
from sparsepack.serve.guards import refused
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.worker import Closing, Ended, Failed, Piece, QueueFull, Ticket

STILL_THERE_SECONDS = 15.0
"""A stream that has had nothing to say for this many seconds shows that the stream lives."""

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the events together
]


class _ClientGone(Exception):
    """Nobody reads the answer."""


@dataclass(frozen=True)
class Delivery:
    """The response to a request whose text waits or is made.

    ticket       -- of the text
    answer       -- what is said around it
    stream       -- in events, as the text is made; or in one piece
    send_timeout -- seconds that the client has to take what is sent

    When the client goes, or stalls for so long, its text is cancelled.
    """

    ticket: Ticket
    answer: Answer
    stream: bool
    send_timeout: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.send_timeout):
                await send(message)

        watch = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            if self.stream:
                await self._send_events(send_in_time)
            else:
                await self._send_whole(scope, receive, send_in_time)
        except TimeoutError:
            say(f"{self.answer.id}: dropped, the client took nothing for {self.send_timeout:g} s")
        finally:
            watch.cancel()
            self.ticket.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.ticket.cancel()
        self.ticket.tell(Failed(_ClientGone()))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = []
        async for event in self.ticket.events():
            match event:
                case Piece():
                    text.append(event.text)
                case Ended():
                    self._log(event)
                    body = self.answer.in_one_piece("".join(text), event)
                    await JSONResponse(body)(scope, receive, send)
                case Failed() if not isinstance(event.error, _ClientGone):
                    await refused(refusal_for(event.error))(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        for chunk in self.answer.opening():
            await _send_more(send, server_sent(chunk))
        async for event in self.ticket.events(STILL_THERE_SECONDS):
            match event:
                case None:
                    await _send_more(send, STILL_THERE)
                case Piece():
                    await _send_more(send, server_sent(self.answer.piece(event.text)))
                case Ended():
                    self._log(event)
                    closing = b"".join(server_sent(chunk) for chunk in self.answer.closing(event))
                    await _send_more(send, closing + END_OF_STREAM)
                case Failed() if not isinstance(event.error, _ClientGone):
                    await _send_more(send, server_sent(refusal_for(event.error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log(self, ended: Ended) -> None:
        say(
            f"{self.answer.id}: {self.answer.prompt_tokens} tokens, {ended.cached} of them cached, "
            f"then {ended.tokens} in {time.time() - self.answer.created:.1f} s ({ended.reason})"
        )


def refusal_for(error: Exception) -> Refusal:
    """What the client is told of an error in a text. What it cannot know goes to the log alone."""
    if isinstance(error, Closing):
        return Refusal(503, str(error), code="server_ending")
    if isinstance(error, QueueFull):
        return queue_full(error)
    if isinstance(error, ArtifactError):
        return Refusal(500, str(error), code="damaged_model")
    logging.getLogger(__name__).error("a text failed", exc_info=error)
    return Refusal(500, "the text could not be made; the server's log says why", code="internal_error")


def queue_full(error: QueueFull) -> Refusal:
    """What the client is told whose text there is no place for."""
    return Refusal(503, str(error), code="queue_full", retry_after=error.seconds)


async def _send_more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(0)  # sending waits for nothing while there is room: let others go on, and see whether one went

"""Checks of who may send requests, and of how large they may be."""

import asyncio
import hmac
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparsepack.serve.page.routes import FILES as PAGE
from sparsepack.serve.refusals import Refusal

OPEN_PATHS = ("/health", *PAGE)
"""Requests for these paths need no key."""

MAX_BODY_BYTES = 4 * 2**20
"""A request's body has at most this many bytes, enough for a prompt of 100,000 tokens and more. Where the context has
less room, so has a body."""

MAX_JSON_VALUES = 2**14
"""A request's body has at most this many JSON values besides the tokens of a prompt. Reading them takes time in which
nobody else is served."""

SMALL_BODY = 2**16
"""A body of at most this many bytes is read in milliseconds."""

MAX_LARGE_BODY_BYTES = 2**26
"""The large bodies that arrive or are read at a time have at most this many bytes together."""

CURRENT_KEY: ContextVar[str] = ContextVar("CURRENT_KEY", default="")
"""The number of the key that the request which is served now came with; empty where the server has no keys."""

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:@\[\]]*))(?::[0-9]*)?")

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Middleware that lets nobody pass without the key, or by a name that is not the server's.

    keys  -- of which requests must carry one; none: they need no key. `CURRENT_KEY` has its number
    hosts -- names that the Host header may have; None: any. A web page can have its own name lead to 127.0.0.1; its
             requests then carry that name.
    refuse -- the answer to a path that refuses
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        hosts: Collection[str] | None,
        refuse: Callable[[str, Refusal], Response],
    ) -> None:
        self._app, self._refuse = app, refuse
        self._keys = [key.encode() for key in keys]
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)):
            await self._refuse(scope["path"], refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and (host := host_name(headers.get("host", ""))) not in self._hosts:
            return Refusal(403, f"host {host!r}: this server answers to {', '.join(self._hosts)}; give it a key")
        if not self._keys or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        sent = (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))  # Anthropic's clients
        found = [n for n, key in enumerate(self._keys) if any(hmac.compare_digest(one.encode(), key) for one in sent)]
        if found:
            CURRENT_KEY.set(str(found[0]))
            return None
        wrong = "the key in it is none of this server's" if given else "there is none"
        return Refusal(401, f"expected the header Authorization: Bearer KEY; {wrong}", code="invalid_api_key")


def host_name(header: str) -> str:
    """The name in a Host header, without its port: `[::1]:8000` is `::1`. What has no such form is returned whole, and
    is nobody's name."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2]).lower() if found else header


class LargeBodies:
    """The memory that large bodies take at a time; of one event loop."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """The memory of one body, while it lasts: a function that is told of each part, of so many bytes. It raises
        `Refusal` 503 where others leave no memory for what is beyond a small body."""
        size = 0

        def grow(count: int) -> None:
            nonlocal size
            more = max(size + count, SMALL_BODY) - max(size, SMALL_BODY)
            if self._bytes + more > MAX_LARGE_BODY_BYTES:
                message = "other large requests take the memory that they may have; try again"
                raise Refusal(503, message, code="queue_full", retry_after=1)
            size, self._bytes = size + count, self._bytes + more

        try:
            yield grow
        finally:
            self._bytes -= max(size, SMALL_BODY) - SMALL_BODY


async def read_json_body(
    request: Request, most: int, seconds: float, grow: Callable[[int], None] = lambda count: None
) -> bytes:
    """The body of a request that says it is JSON; raises `Refusal` where it is not, too large or too slow.

    seconds -- in which it must have arrived
    grow    -- is told of each part of so many bytes, see `LargeBodies`

    A browser sends JSON to another site only where that allows it, so that a web page cannot make this one work.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"Content-Type {kind!r}: expected application/json")
    too_large = Refusal(413, f"the body is larger than {most:,} bytes, which no prompt needs that fits; shorten it")
    if int(request.headers.get("content-length", "0") or 0) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                grow(len(part))
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the client went before its request had arrived") from error
    return bytes(body)


def check_values(body: bytes, most: int) -> None:
    """Raise `Refusal` 413 where a body has more than `most` JSON values, in a few milliseconds and before any of them
    is made: millions of lists within 4 MB would take seconds."""
    most_marks = 4 * most  # of a name and of a text
    # Without escapes, every second piece between quotation marks stands outside of texts.
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', most_marks + 1)
    begun = sum(piece.count(mark) for piece in pieces[::2] for mark in (b",", b"[", b"{"))
    if len(pieces) > most_marks + 1 or begun > most:
        raise Refusal(413, f"the body has more than {most:,} JSON values; send fewer")

"""What a server has done, as Prometheus reads it."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsepack.serve.ticket import Finish

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters of one server.

    running, waiting -- functions that tell how many texts are made now, and how many wait
    bits_read        -- a function that tells how many bits of a weight tokens read; None: weights have no planes
    """

    def __init__(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        bits_read: Callable[[], float] | None = None,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "sparsepack_requests_total", "Requests that were answered.", ["path", "status"], registry=registry
        )
        self._prompt = Counter(
            "sparsepack_prompt_tokens_total", "Tokens of prompts whose texts ended.", registry=registry
        )
        self._cached = Counter(
            "sparsepack_cached_prompt_tokens_total",
            "Tokens of prompts that were not computed again.",
            registry=registry,
        )
        self._completion_tokens = Counter(
            "sparsepack_completion_tokens_total", "Tokens that were made.", registry=registry
        )
        self._ended = Counter(
            "sparsepack_texts_total", "Texts that ended, by why they did.", ["reason"], registry=registry
        )
        self._first = Histogram(
            "sparsepack_first_piece_seconds",
            "From a request to the first piece of its text.",
            buckets=SECONDS,
            registry=registry,
        )
        self._whole = Histogram(
            "sparsepack_text_seconds", "From a request to the end of its text.", buckets=SECONDS, registry=registry
        )
        for name, says, of in (
            ("sparsepack_texts_making", "Texts that are made now.", running),
            ("sparsepack_texts_waiting", "Texts that wait.", waiting),
        ):
            Gauge(name, says, registry=registry).set_function(of)
        if bits_read is not None:
            says = "Bits of a weight that decoded tokens read, the mean over all blocks, scales included."
            Gauge("sparsepack_bits_read", says, registry=registry).set_function(bits_read)

    def count_response(self, path: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(path, str(status)).inc()

    def count_first_delta(self, received_at: float) -> None:
        """Count the first piece of a text that was asked for at a time of `time.monotonic`."""
        self._first.observe(time.monotonic() - received_at)

    def count_finish(self, received_at: float, prompt_tokens: int, ended: Finish) -> None:
        """Count a text that has ended."""
        self._whole.observe(time.monotonic() - received_at)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(ended.cached)
        self._completion_tokens.inc(ended.tokens)
        self._ended.labels(ended.reason).inc()

    def count_outcome(self, outcome: str) -> None:
        """Count a text that was not made to its end."""
        self._ended.labels(outcome).inc()

    def text(self) -> bytes:
        """Return everything that was counted, in Prometheus's text format."""
        return generate_latest(self._registry)


class Counting:
    """Middleware that counts answers, by path and status.

    paths -- those that are told apart; the others are one
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, begun = scope["path"] if scope["path"] in self._paths else "other", False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.count_response(path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:  # what answers it stands around this
                self._metrics.count_response(path, 500)
            raise

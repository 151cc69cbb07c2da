"""A request for a text, the ticket that its client waits with, and the events that the engine's thread puts there."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from sparsepack.runtime.generation.sampling import TokenLogprob
from sparsepack.runtime.options import GenerateOptions


@dataclass(frozen=True)
class GenerationRequest:
    """A text to continue, checked.

    ids     -- of the prompt; they and `options.tokens` more fit into the engine's context
    options -- how many tokens at most, how they are chosen, what ends the text
    echo    -- what the text begins with, the prompt; with log-probabilities where the options have them. None: nothing
    """

    ids: tuple[int, ...]
    options: GenerateOptions
    echo: str | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the request wants likelihoods of the prompt's tokens."""
        return self.echo is not None and self.options.logprobs is not None


@dataclass(frozen=True)
class Timings:
    """How fast a text is made, up to some token of it.

    prompt_tokens     -- that were computed; those that the engine still had are not among them
    prompt_seconds    -- from when the prompt began to be read to the first token, which comes of it
    tokens            -- that the model made, as in `Finish`
    decode_seconds    -- from the first token to this one
    tokens_per_second -- of the steps after the first token; None without one
    skipped           -- share of the blocks' weights, or of their bits, that these steps did not read, in the mean;
                         None without one. A step reads for all texts that are made together what any of them needs. It
                         is as of at most `batch.COUNT_EVERY` seconds before.
    bits_read         -- bits of a weight that they did read, in the mean
    """

    prompt_tokens: int
    prompt_seconds: float
    tokens: int
    decode_seconds: float
    tokens_per_second: float | None
    skipped: float | None
    bits_read: float | None


@dataclass(frozen=True)
class TextDelta:
    """A piece of text, of whole characters.

    logprobs -- of the tokens that were made since the piece before, where the request asks for them
    timings  -- up to its last token
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Finish:
    """The text is made.

    reason -- "stop": the model or a stop string ended it; "length": as many tokens are made as were asked for
    tokens -- that the model made, those of a stop string included, its end of text not
    cached -- of the prompt's tokens, those that the engine still had from the text before
    logprobs -- of the last tokens, which gave no piece of their own
    stop   -- the stop string that ended the text; None: another reason did
    timings -- of the whole text; None: no token was made
    """

    reason: str
    tokens: int
    cached: int
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    timings: Timings | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Failure:
    """The text cannot be made."""

    error: Exception


Event = TextDelta | Finish | Failure


class Ticket:
    """A text on its way; made by `Scheduler.submit` for the event loop that runs then.

    client  -- who asks
    domain  -- computed prefixes are shared within it alone
    discard -- called when it is cancelled
    """

    def __init__(
        self, request: GenerationRequest, client: str, domain: str, discard: "Callable[[Ticket], None]"
    ) -> None:
        self.request, self.client, self.domain = request, client, domain
        self._discard = discard
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancelled = threading.Event()

    async def events(self, patience: float | None = None) -> AsyncIterator[Event | None]:
        """The pieces as they are made, then `Finish` or `Failure`; None where nothing comes for `patience` seconds."""
        event: Event | None = None
        while event is None or isinstance(event, TextDelta):
            try:
                async with asyncio.timeout(patience):
                    event = await self._events.get()
            except TimeoutError:
                event = None
            yield event

    def cancel(self) -> None:
        """Nobody waits for the text any more. May be called at any time, more than once."""
        self._cancelled.set()
        self._discard(self)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the text any more."""
        return self._cancelled.is_set()

    def put(self, event: Event) -> None:
        """Hand an event to the event loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            self._cancelled.set()

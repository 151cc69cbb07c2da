"""The texts that an engine makes at a time, one in each of its slots; they join and leave between tokens.

A turn is a piece of the prompts that have joined, and then a token of each text whose prompt is read:

    turn    1       2       3       4       5       6
    text A  prompt  token   token   token   token   token
    text B          prompt  prompt  token   token   (ends)
    text C                                  prompt  token
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from sparsepack.loading import Model
from sparsepack.runtime.engine import Counts
from sparsepack.runtime.generation.continuation import Continuation
from sparsepack.runtime.generation.sampling import Sampler, TokenLogprob, token_logprobs
from sparsepack.serve.ticket import Failure, Finish, TextDelta, Ticket, Timings

PREFILLED_AT_ONCE = 512
"""So many positions of prompts a turn reads at most while no text is in the making; decoders take so many together."""

SCORED_AT_ONCE = 128
"""So many it reads at most of a prompt that is scored: each position then has all its logits."""

PREFILLED_BETWEEN_TOKENS = 64
"""So many it reads at most where texts wait for their next token: a prompt is then read little slower than at once, and
a stream is held up no longer than by some tokens."""

KEPT_IN_STEPS_OF = 32
"""A prefill goes on from a multiple of this many positions. The CPU's kernels then add in the same order as if the
prefill had begun at the beginning, so that the bits are the same: with the AVX2 kernels, where that was tried."""

COUNT_EVERY = 1.0
"""Seconds between two readings of what the steps of a text skipped. A GPU is waited for then, which takes
it microseconds."""

_REASONS = {"eos": "stop", "stop": "stop", "tokens": "length", "context": "length"}


@dataclass(eq=False)
class _Sequence:
    """A text that is generated in one of the engine's slots.

    cached    -- positions of the prompt that are not read for this text
    chosen    -- the token to append next; None: the prompt is not read to its end
    followers -- texts after the same prompt, which is read once for all of them
    scored    -- how likely the tokens of the prompt were, as far as it is read, where the request asks for it
    joined    -- when it began; first: when its first token came (monotonic seconds)
    steps     -- after the first token
    before    -- what the engine had counted at the first token
    skipped   -- as in `Timings`, as of `counted` (monotonic seconds)
    """

    ticket: Ticket
    slot: int
    continuation: Continuation
    cached: int
    chosen: int | None = None
    followers: "list[_Sequence]" = field(default_factory=list)
    joined: float = field(default_factory=time.monotonic)
    first: float = 0.0
    steps: int = -1
    before: Counts | None = None
    skipped: float | None = None
    counted: float = 0.0
    scored: list[TokenLogprob] = field(default_factory=list)


class ContinuousBatch:
    """See above. For one thread.

    A text goes on from what its prompt has in common with another prompt, the last of a slot that is free or the
    one of a text in the making, so that of a chat only what is new is prefilled. A prompt that several texts wait for
    is read once, and copied. Answers are not kept: their tokens were decoded, with columns skipped, and a prompt runs
    dense. So the same request, made alone, gives the same answer, whatever was asked before; elsewhere up to the last
    bits of the logits.
    """

    def __init__(self, model: Model) -> None:
        self._engine, self._tokenizer = model.engine, model.tokenizer
        self._domains = [""] * len(model.engine.positions)  # of what each slot has read
        self._free: list[int] = [*range(len(model.engine.positions))]  # the one that was used last is the last
        self._running: list[_Sequence] = []
        self._bits_read = math.nan
        self._reading: deque[_Sequence] = deque()  # those of whose prompts a part is to be read, by turns

    @property
    def capacity(self) -> int:
        """How many texts it makes together at most."""
        return len(self._engine.positions)

    @property
    def bits_read(self) -> float:
        """Bits of a weight with planes that decoded tokens read, up to when the last text ended and no other was made;
        NaN before."""
        return self._bits_read

    @property
    def has_room(self) -> bool:
        """Whether a text can join."""
        return bool(self._free)

    @property
    def tickets(self) -> list[Ticket]:
        """What the texts in the making are made for."""
        return [sequence.ticket for sequence in [*self._running]]

    def join(self, ticket: Ticket) -> None:
        """Begin a text; there is room. What fails is told."""
        request, ids = ticket.request, list(ticket.request.ids)
        if not request.options.tokens and not request.scores_prompt:
            if request.echo:
                ticket.put(TextDelta(request.echo))
            ticket.put(Finish("length", 0, 0))
            return
        domain, scores = ticket.domain, request.scores_prompt  # which reads all of the prompt, for the logits
        same = (one for one in self._reading if one.ticket.domain == domain and one.continuation.ids == ids)
        leader = None if scores else next(same, None)
        source = self._free[0] if scores else self._nearest(ids, domain) if leader is None else leader.slot
        slot = source if source in self._free else self._free[0]
        self._free.remove(slot)
        try:
            if scores:
                self._engine.truncate(0, slot)
            cached = self._reuse_prefix(ids, slot, source, domain) if leader is None else len(ids)
            continuation = Continuation(self._engine, self._tokenizer, ids, request.options)
        except Exception as error:
            self._free.append(slot)
            ticket.put(Failure(error))
            return
        self._domains[slot] = domain
        sequence = _Sequence(ticket, slot, continuation, cached)
        self._running.append(sequence)
        (self._reading if leader is None else leader.followers).append(sequence)

    def advance(self) -> None:
        """Make a turn. What fails is told, and later texts begin anew."""
        self._drop_cancelled()
        self._read()
        self._drop_cancelled()
        self._step()

    @property
    def _decoding(self) -> list[_Sequence]:
        """Those whose prompts are read."""
        return [sequence for sequence in self._running if sequence.chosen is not None]

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in self._running if sequence.ticket.cancelled]:
            self._leave(sequence)

    def _nearest(self, ids: list[int], domain: str) -> int:
        """The slot from which most of a prompt can be taken; of equal ones, the free one that was left longest
        ago."""
        slots = [*self._free, *(sequence.slot for sequence in self._running)]
        return max(slots, key=lambda n: self._common(ids, n, domain))

    def _common(self, ids: list[int], slot: int, domain: str) -> int:
        """How many positions of a prompt can be taken from a slot: none that were decoded, none of another domain."""
        if self._domains[slot] != domain:
            return 0
        read = next((len(sequence.continuation.ids) for sequence in self._running if sequence.slot == slot), len(ids))
        common: int = min(self._engine.common(ids, slot), read)
        return self._engine.reusable(common // KEPT_IN_STEPS_OF * KEPT_IN_STEPS_OF, slot)

    def _reuse_prefix(self, ids: list[int], slot: int, source: int, domain: str) -> int:
        """Let a slot have what a prompt can take from another, or from itself; how many positions those are."""
        common = self._common(ids, source, domain)
        if source == slot:
            self._engine.truncate(common, slot)
        else:
            self._engine.copy(source, slot, common)
        return common

    def _leave(self, sequence: _Sequence) -> None:
        """Free a text's slot, which keeps what was read of the prompt."""
        self._running.remove(sequence)
        slot = sequence.slot
        if sequence.chosen is not None:
            read = min(self._engine.positions[slot], len(sequence.continuation.ids))
            self._engine.truncate(self._engine.reusable(read, slot), slot)
        self._free.append(slot)
        for leader in [leader for leader in self._reading if sequence in leader.followers]:
            leader.followers.remove(sequence)
        if sequence in self._reading:
            self._reading.remove(sequence)
            self._promote_follower([follower for follower in sequence.followers if not follower.ticket.cancelled])

    def _count_bits(self) -> None:
        """Count what was read. The device is asked, so that no other text may wait for it."""
        if (bits := self._engine.packed.plane_bits) and (skipped := self._engine.skipped()):
            self._bits_read = bits * (1 - skipped.overall)

    def _timings(self, sequence: _Sequence) -> Timings:
        """Return the timings of a text at each new token."""
        now, continuation = time.monotonic(), sequence.continuation
        sequence.steps += 1
        if sequence.before is None:
            sequence.first = sequence.counted = now
            sequence.before = self._engine.counts()
        elif continuation.reason or now - sequence.counted >= COUNT_EVERY:
            skipped = self._engine.skipped(sequence.before)
            sequence.skipped, sequence.counted = None if skipped is None else skipped.overall, now
        seconds = now - sequence.first
        return Timings(
            prompt_tokens=len(continuation.ids) - sequence.cached,
            prompt_seconds=sequence.first - sequence.joined,
            tokens=len(continuation.tokens),
            decode_seconds=seconds,
            tokens_per_second=sequence.steps / seconds if seconds else None,
            skipped=sequence.skipped,
            bits_read=None if sequence.skipped is None else self._engine.packed.block_bits * (1 - sequence.skipped),
        )

    def _promote_follower(self, followers: list[_Sequence]) -> None:
        """Let the first of some texts, whose prompt nobody reads any more, read it for all of them."""
        if not followers:
            return
        leader, *leader.followers = followers
        ids = leader.continuation.ids
        self._reading.appendleft(leader)
        try:
            domain = leader.ticket.domain
            leader.cached = self._reuse_prefix(ids, leader.slot, self._nearest(ids, domain), domain)
        except Exception as error:
            self._fail(leader, error)

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        """End a text in whose slot nobody knows what there is."""
        self._engine.truncate(0, sequence.slot)
        self._leave(sequence)
        sequence.ticket.put(Failure(error))

    def _read(self) -> None:
        """Read a piece of some prompts, which take turns: a long one does not keep a short one waiting."""
        left = PREFILLED_BETWEEN_TOKENS if self._decoding else PREFILLED_AT_ONCE
        for _ in range(len(self._reading)):
            sequence = self._reading[0]
            position, ids = self._engine.positions[sequence.slot], sequence.continuation.ids
            scores = sequence.ticket.request.scores_prompt
            most = min(left, SCORED_AT_ONCE) if scores else left
            end = min(len(ids), (position + most) // KEPT_IN_STEPS_OF * KEPT_IN_STEPS_OF)
            if end <= position:
                return
            try:
                logits = self._engine.prefill(ids[position:end], sequence.slot, every=scores)
                if scores:
                    self._score(sequence, position, logits)
                    logits = logits[-1]
            except Exception as error:
                self._fail(sequence, error)
                continue
            self._reading.popleft()
            left -= end - position
            if end < len(ids):
                self._reading.append(sequence)
            else:
                self._begin(sequence, logits)

    def _score(self, sequence: _Sequence, position: int, logits: Tensor) -> None:
        """Keep how likely tokens of the prompt were, by the logits from a position on; nothing predicts the first."""
        ids, count = sequence.continuation.ids, sequence.ticket.request.options.logprobs
        assert count is not None
        targets = ids[position + 1 : position + 1 + len(logits)]
        if not position:
            sequence.scored.append(TokenLogprob(ids[0], None, ()))
        if targets:
            sequence.scored += token_logprobs(targets, logits[: len(targets)], count)

    def _begin(self, sequence: _Sequence, logits: Tensor) -> None:
        """Choose the first token of a text and of its followers, of the logits after the prompt that they share."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            try:
                self._engine.copy(sequence.slot, follower.slot, len(sequence.continuation.ids))
            except Exception as error:
                self._fail(follower, error)
        for each in (one for one in [sequence, *followers] if one in self._running):
            request = each.ticket.request
            if request.echo is not None:
                each.ticket.put(TextDelta(request.echo, tuple(each.scored)))
            if not request.options.tokens:
                self._leave(each)
                each.ticket.put(Finish("length", 0, each.cached))
                continue
            try:
                chosen = each.continuation.sampler.choose(logits)
            except Exception as error:
                self._fail(each, error)
            else:
                self._take(each, chosen)

    def _step(self) -> None:
        """Append the token that was chosen to each text, and choose the next."""
        ids: list[int | None] = [None] * len(self._engine.positions)
        samplers: list[Sampler | None] = [None] * len(ids)
        if not (decoding := self._decoding):
            return
        for sequence in decoding:
            ids[sequence.slot], samplers[sequence.slot] = sequence.chosen, sequence.continuation.sampler
        try:
            chosen = self._engine.decode_all(ids, samplers)
        except Exception as error:
            for sequence in decoding:
                self._fail(sequence, error)
            return
        for sequence in decoding:
            if (id := chosen[sequence.slot]) is not None:
                self._take(sequence, id)

    def _take(self, sequence: _Sequence, id: int) -> None:
        """Tell what a token adds to a text, and its end where it was the last."""
        continuation = sequence.continuation
        try:
            piece = continuation.take(id)
            timings = self._timings(sequence)
        except Exception as error:
            self._fail(sequence, error)
            return
        sequence.chosen = id
        # Whoever has the prompt's likelihoods counts on one for each token after it, the end of the text included.
        with_end = sequence.ticket.request.scores_prompt
        if piece:
            sequence.ticket.put(TextDelta(piece, continuation.taken_logprobs(with_end), timings))
        if continuation.reason:
            self._leave(sequence)
            if not self._running:
                self._count_bits()
            ended = Finish(
                _REASONS[continuation.reason],
                len(continuation.tokens),
                sequence.cached,
                continuation.taken_logprobs(with_end),
                continuation.stop,
                timings,
            )
            sequence.ticket.put(ended)

"""The texts that an engine makes at a time, one in each of its sequences; they join and leave between tokens.

A turn is a piece of the prompts that have joined, and then a token of each text whose prompt is read:

    turn    1       2       3       4       5       6
    text A  prompt  token   token   token   token   token
    text B          prompt  prompt  token   token   (ends)
    text C                                  prompt  token
"""

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from sparsepack.loading import Model
from sparsepack.runtime.generation.continuation import Continuation
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.serve.ticket import Failure, Finish, TextDelta, Ticket

PREFILLED_AT_ONCE = 512
"""So many positions of prompts a turn reads at most while no text is in the making; decoders take so many together."""

PREFILLED_BETWEEN_TOKENS = 64
"""So many it reads at most where texts wait for their next token: a prompt is then read little slower than at once, and
a stream is held up no longer than by some tokens."""

KEPT_IN_STEPS_OF = 32
"""A prefill goes on from a multiple of this many positions. The CPU's kernels then add in the same order as if the
prefill had begun at the beginning, so that the bits are the same: with the AVX2 kernels, where that was tried."""

_REASONS = {"eos": "stop", "stop": "stop", "tokens": "length", "context": "length"}


@dataclass(eq=False)
class _Text:
    """A text in one of the engine's sequences.

    cached    -- positions of the prompt that are not read for this text
    chosen    -- the token to append next; None: the prompt is not read to its end
    followers -- texts after the same prompt, which is read once for all of them
    """

    ticket: Ticket
    sequence: int
    continuation: Continuation
    cached: int
    chosen: int | None = None
    followers: "list[_Text]" = field(default_factory=list)


class ContinuousBatch:
    """See above. For one thread.

    A text goes on from what its prompt has in common with another prompt, the last of a sequence that is free or the
    one of a text in the making, so that of a chat only what is new is prefilled. A prompt that several texts wait for
    is read once, and copied. Answers are not kept: their tokens were decoded, with columns skipped, and a prompt runs
    dense. So the same request, made alone, gives the same answer, whatever was asked before; elsewhere up to the last
    bits of the logits.
    """

    def __init__(self, model: Model) -> None:
        self._engine, self._tokenizer = model.engine, model.tokenizer
        self._free: list[int] = [*range(len(model.engine.positions))]  # the one that was used last is the last
        self._texts: list[_Text] = []
        self._reading: deque[_Text] = deque()  # those of whose prompts a part is to be read, by turns

    @property
    def capacity(self) -> int:
        """How many texts it makes together at most."""
        return len(self._engine.positions)

    @property
    def has_room(self) -> bool:
        """Whether a text can join."""
        return bool(self._free)

    @property
    def tickets(self) -> list[Ticket]:
        """What the texts in the making are made for."""
        return [text.ticket for text in [*self._texts]]

    def join(self, ticket: Ticket) -> None:
        """Begin a text; there is room. What fails is told."""
        request, ids = ticket.request, list(ticket.request.ids)
        if not request.options.tokens:
            ticket.tell(Finish("length", 0, 0))
            return
        leader = next((text for text in self._reading if text.continuation.ids == ids), None)
        source = self._nearest(ids) if leader is None else leader.sequence
        sequence = source if source in self._free else self._free[0]
        self._free.remove(sequence)
        try:
            cached = self._reuse_prefix(ids, sequence, source) if leader is None else len(ids)
            continuation = Continuation(self._engine, self._tokenizer, ids, request.options)
        except Exception as error:
            self._free.append(sequence)
            ticket.tell(Failure(error))
            return
        text = _Text(ticket, sequence, continuation, cached)
        self._texts.append(text)
        (self._reading if leader is None else leader.followers).append(text)

    def advance(self) -> None:
        """Make a turn. What fails is told, and later texts begin anew."""
        self._drop_cancelled()
        self._read()
        self._drop_cancelled()
        self._step()

    @property
    def _going(self) -> list[_Text]:
        """The texts whose prompts are read."""
        return [text for text in self._texts if text.chosen is not None]

    def _drop_cancelled(self) -> None:
        for text in [text for text in self._texts if text.ticket.cancelled]:
            self._leave(text)

    def _nearest(self, ids: list[int]) -> int:
        """The sequence from which most of a prompt can be taken; of equal ones, the free one that was left longest
        ago."""
        sequences = [*self._free, *(text.sequence for text in self._texts)]
        return max(sequences, key=lambda n: self._common(ids, n))

    def _common(self, ids: list[int], sequence: int) -> int:
        """How many positions of a prompt can be taken from a sequence: none that were decoded."""
        read = next((len(text.continuation.ids) for text in self._texts if text.sequence == sequence), len(ids))
        common: int = min(self._engine.common(ids, sequence), read)
        return common // KEPT_IN_STEPS_OF * KEPT_IN_STEPS_OF

    def _reuse_prefix(self, ids: list[int], sequence: int, source: int) -> int:
        """Let a sequence have what a prompt can take from another, or from itself; how many positions those are."""
        common = self._common(ids, source)
        if source == sequence:
            self._engine.truncate(common, sequence)
        else:
            self._engine.copy(source, sequence, common)
        return common

    def _leave(self, text: _Text) -> None:
        """Free a text's sequence, which keeps what was read of the prompt."""
        self._texts.remove(text)
        sequence = text.sequence
        if text.chosen is not None:
            self._engine.truncate(min(self._engine.positions[sequence], len(text.continuation.ids)), sequence)
        self._free.append(sequence)
        for leader in [leader for leader in self._reading if text in leader.followers]:
            leader.followers.remove(text)
        if text in self._reading:
            self._reading.remove(text)
            self._promote_follower([follower for follower in text.followers if not follower.ticket.cancelled])

    def _promote_follower(self, followers: list[_Text]) -> None:
        """Let the first of some texts, whose prompt nobody reads any more, read it for all of them."""
        if not followers:
            return
        leader, *leader.followers = followers
        ids = leader.continuation.ids
        self._reading.appendleft(leader)
        try:
            leader.cached = self._reuse_prefix(ids, leader.sequence, self._nearest(ids))
        except Exception as error:
            self._fail(leader, error)

    def _fail(self, text: _Text, error: Exception) -> None:
        """End a text in whose sequence nobody knows what there is."""
        self._engine.truncate(0, text.sequence)
        self._leave(text)
        text.ticket.tell(Failure(error))

    def _read(self) -> None:
        """Read a piece of some prompts, which take turns: a long one does not keep a short one waiting."""
        left = PREFILLED_BETWEEN_TOKENS if self._going else PREFILLED_AT_ONCE
        for _ in range(len(self._reading)):
            text = self._reading[0]
            position, ids = self._engine.positions[text.sequence], text.continuation.ids
            end = min(len(ids), (position + left) // KEPT_IN_STEPS_OF * KEPT_IN_STEPS_OF)
            if end <= position:
                return
            try:
                logits = self._engine.prefill(ids[position:end], text.sequence)
            except Exception as error:
                self._fail(text, error)
                continue
            self._reading.popleft()
            left -= end - position
            if end < len(ids):
                self._reading.append(text)
            else:
                self._begin(text, logits)

    def _begin(self, text: _Text, logits: Tensor) -> None:
        """Choose the first token of a text and of its followers, of the logits after the prompt that they share."""
        followers, text.followers = text.followers, []
        for follower in followers:
            try:
                self._engine.copy(text.sequence, follower.sequence, len(text.continuation.ids))
            except Exception as error:
                self._fail(follower, error)
        for each in (one for one in [text, *followers] if one in self._texts):
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
        if not (going := self._going):
            return
        for text in going:
            ids[text.sequence], samplers[text.sequence] = text.chosen, text.continuation.sampler
        try:
            chosen = self._engine.decode_all(ids, samplers)
        except Exception as error:
            for text in going:
                self._fail(text, error)
            return
        for text in going:
            if (id := chosen[text.sequence]) is not None:
                self._take(text, id)

    def _take(self, text: _Text, id: int) -> None:
        """Tell what a token adds to a text, and its end where it was the last."""
        made = text.continuation
        try:
            piece = made.take(id)
        except Exception as error:
            self._fail(text, error)
            return
        text.chosen = id
        if piece:
            text.ticket.tell(TextDelta(piece, made.taken_logprobs()))
        if made.reason:
            self._leave(text)
            ended = Finish(_REASONS[made.reason], len(made.tokens), text.cached, made.taken_logprobs())
            text.ticket.tell(ended)

"""One text while it is made, alone, beside others or in a server: what chooses its tokens, its text, and its end."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType

from tokenizers import Tokenizer

from sparsepack.errors import UserError
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling, TokenLogprob
from sparsepack.runtime.options import GenerateOptions


class StopText:
    """Lets a text through up to a stop string, which is not told, and no part of it either.

    stops -- the strings; none: everything passes
    found -- the one that ended the text; None: none has yet

    The stop string that is complete first ends the text, the longest of several that are complete at once: how the
    text is cut into pieces makes no difference. What could be the beginning of a stop string is held back until the
    next characters decide. Raises `UserError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise UserError("stop: an empty string would end every text at once; expected at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._pending = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text. Returns what certainly stands before any stop string; nothing once one was found."""
        if self.found is not None:
            return ""
        text = self._pending + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            self._pending = ""
            return text[:at]
        kept = self._beginning_at_the_end_of(text)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, when no more text comes: it was no stop string after all."""
        rest, self._pending = self._pending, ""
        return rest

    def _beginning_at_the_end_of(self, text: str) -> int:
        """How many of the last characters could begin a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns tokens into text as they come; the pieces together are the text of all tokens.

    tokenizer -- of the model; special tokens give no text
    preserved -- but these do: their texts by their ids
    prompt    -- ids before the first token: they give no text themselves, but decide whether a leading space belongs

    A token's text depends on its neighbours: bytes of one character may lie in several tokens, and decoders drop the
    space before the first word. So a piece is always the difference of two decodings that begin at the same token.
    `tokenizers.decoders.DecodeStream` is no substitute: it repeats an unfinished character of the prompt, raises where
    a word follows incomplete bytes, and cannot give the rest when no more tokens come.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), preserved: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._tokenizer, self._preserved = tokenizer, preserved
        self._ids = list(prompt)  # from the beginning of the last piece
        self._sent = len(self._ids)  # of these, tokens whose text is out

    def push(self, id: int) -> str:
        """Add a token. Returns the text that is certain now: empty while the last character is incomplete."""
        if id in self._preserved:
            text = self.finish() + self._preserved[id]
            self._ids, self._sent = [id], 1
            return text
        self._ids.append(id)
        text = self._unsent()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._ids[: self._sent]
        self._sent = len(self._ids)
        return text

    def finish(self) -> str:
        """The rest, when no more tokens come; incomplete characters show as U+FFFD."""
        text = self._unsent()
        self._sent = len(self._ids)
        return text

    def _unsent(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._sent])) :]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class Continuation:
    """A text that goes on from a prompt, token by token.

    ids     -- of the prompt; they fit into the engine's context
    number  -- of the prompt among several: it draws by the seed + number

    sampler -- what chooses the next token
    tokens  -- those that were made, those of a stop string included, the model's end of text not
    reason  -- why the text has ended, as `runtime.generation.generate.Generated` has it; empty: it goes on
    stop    -- the stop string that came
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, ids: Sequence[int], options: GenerateOptions, number: int = 0
    ) -> None:
        self.ids = list(ids)
        self._eos = {*options.stop_token_ids, *(() if options.ignore_eos else engine.architecture.eos)}
        self.sampler = Sampler(sampling_of(options, number), ids, self._eos)
        self.tokens: list[int] = []
        self.reason = "" if options.tokens else "tokens"
        self.stop: str | None = None
        self._most, self._room = options.tokens, engine.context - len(ids) + 1  # the last token is never appended
        special = tokenizer.get_added_tokens_decoder() if options.stop or options.preserved_tokens else {}
        preserved = {id: special[id].content for id in options.preserved_tokens if id in special}
        self._stream, self._stops = TextStream(tokenizer, ids, preserved), StopText(options.stop)
        # Special tokens have no text of their own in the answer unless they are preserved.
        self._stop_ids = {id: t.content for id, t in special.items() if t.special and t.content in options.stop}
        self._sent: list[str] = []

    @property
    def text(self) -> str:
        """What was told."""
        return "".join(self._sent)

    @property
    def left(self) -> int:
        """How many tokens may still be made."""
        return min(self._most, self._room) - len(self.tokens)

    def take(self, id: int) -> str:
        """Add the token that the sampler chose. Returns the text that is certain now; where the token was the last,
        `reason` is there and so is the text that was held back. Raises `UserError` where the choice failed."""
        self.sampler.check()
        piece = ""
        if id in self._eos and id not in self._stop_ids:
            self.reason = "eos"
        else:
            self.tokens.append(id)
            if id in self._stop_ids:
                self.reason, self.stop = "stop", self._stop_ids[id]
            else:
                piece = self._stops.push(self._stream.push(id))
                self._end_where_stopped()
        if not self.reason and len(self.tokens) >= min(self._most, self._room):
            self.reason = "tokens" if len(self.tokens) >= self._most else "context"
        if self.reason and self._stops.found is None:
            piece += self._stops.push(self._stream.finish()) + self._stops.finish()
            self._end_where_stopped()
        if piece:
            self._sent.append(piece)
        return piece

    def taken_logprobs(self, with_end: bool = False) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens made since the last call; empty where the options do not ask for them.

        with_end -- that of the token that ended the text, too, which is none of its tokens
        """
        taken = self.sampler.taken_logprobs()
        return taken[:-1] if self.reason == "eos" and not with_end else taken

    def _end_where_stopped(self) -> None:
        if self._stops.found is not None:
            self.reason, self.stop = "stop", self._stops.found


def sampling_of(options: GenerateOptions, number: int = 0) -> Sampling:
    """How the tokens of prompt `number` are chosen. Raises `UserError` for a value out of range."""
    given = {field.name: getattr(options, field.name) for field in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    return replace(sampling, seed=options.seed + number)

"""One text while it is made, alone, beside others or in a server: what chooses its tokens, its text, and its end."""

from collections.abc import Sequence
from dataclasses import fields, replace

from tokenizers import Tokenizer

from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.detokenise import TextStream
from sparsepack.runtime.generation.sampling import Sampler, Sampling, TokenLogprob
from sparsepack.runtime.generation.stopping import StopText
from sparsepack.runtime.options import GenerateOptions


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
        self.sampler = Sampler(sampling_of(options, number), ids)
        self.tokens: list[int] = []
        self.reason = "" if options.tokens else "tokens"
        self.stop: str | None = None
        self._most, self._room = options.tokens, engine.context - len(ids) + 1  # the last token is never appended
        self._eos = engine.architecture.eos
        self._stream, self._stops = TextStream(tokenizer, ids), StopText(options.stop)
        special = tokenizer.get_added_tokens_decoder() if options.stop else {}
        # Special tokens have no text of their own in the answer.
        self._stop_ids = {id: t.content for id, t in special.items() if t.special and t.content in options.stop}
        self._told: list[str] = []

    @property
    def text(self) -> str:
        """What was told."""
        return "".join(self._told)

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
            self._told.append(piece)
        return piece

    def taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens made since the last call; empty where the options do not ask for them."""
        taken = self.sampler.taken_logprobs()
        return taken[:-1] if self.reason == "eos" else taken  # the end of the text is none of its tokens

    def _end_where_stopped(self) -> None:
        if self._stops.found is not None:
            self.reason, self.stop = "stop", self._stops.found


def sampling_of(options: GenerateOptions, number: int = 0) -> Sampling:
    """How the tokens of prompt `number` are chosen. Raises `UserError` for a value out of range."""
    given = {field.name: getattr(options, field.name) for field in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    return replace(sampling, seed=options.seed + number)

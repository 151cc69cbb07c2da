"""Talk to a packed model: a prompt in, text out as it is made."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tokenizers import Tokenizer

from sparsepack.errors import ArtifactError, UserError
from sparsepack.models.records.skipped import Skipped
from sparsepack.models.tokenizer.tokenizer_check import check_tokenizer
from sparsepack.runtime.detokenise import TextStream
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import GenerateOptions
from sparsepack.runtime.sampling import Sampler, Sampling, TokenLogprob
from sparsepack.runtime.stopping import StopText


@dataclass(frozen=True)
class Generated:
    """A continuation, and how it was made.

    text          -- what was made, without the stop string
    tokens        -- its ids, those of the stop string included, the model's end of text not
    reason        -- why it ended: "eos" (the model ended it), "stop" (a stop string came), "tokens" (as many as asked
                     for), "context" (it is full), "cancelled" (nobody asked for the rest)
    stop          -- the stop string that came
    prompt_tokens -- of the prompt; prefilled -- how many of them were not in the cache yet
    decoded       -- steps after the prefill, each of one token; with several texts together, of all of them
    skipped       -- what the steps skipped; None without one
    """

    text: str
    tokens: tuple[int, ...]
    reason: str
    stop: str | None
    prompt_tokens: int
    prefilled: int
    prefill_seconds: float
    decoded: int
    decode_seconds: float
    skipped: Skipped | None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second, the prefill and what the caller did in between left out; None without one."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds else None


class Generation(Iterator[str]):
    """Texts that are being made, one in each of an engine's sequences: pieces, never a part of a character, until all
    of them end. With one text the pieces are that text.

    `result` says how the text has ended, and makes what is left where some is; `results` says so of each text. `close`
    ends them early. The engine works for one generation at a time: a new one takes it away from an old one.

    prompts  -- ids of each prompt; prompt n draws by the seed + n
    keep     -- whether to go on from what the engine has of each prompt; otherwise the engine forgets its texts
    unwanted -- asked before every step: whether to end here, as `close` does
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        options: GenerateOptions,
        keep: bool = False,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._options, self._keep, self._unwanted = engine, options, keep, unwanted
        self._prompts = [list(ids) for ids in prompts]
        self._samplers = [Sampler(_sampling(options, n), ids) for n, ids in enumerate(prompts)]
        self._answers = [_Answer(tokenizer, ids, options, engine.architecture.eos) for ids in prompts]
        self._prefilled, self._decoded = [0] * len(prompts), 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._skipped: Skipped | None = None
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End it here; `result` is what was made until now."""
        self._pieces.close()

    def result(self) -> Generated:
        """The whole of the one text, once it has ended: runs what is left."""
        return self.results()[0]

    def taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The logprobs of the one text's tokens chosen since the last call, where the options ask for them."""
        return self._samplers[0].taken_logprobs()

    def results(self) -> list[Generated]:
        """Each text, once all have ended: runs what is left."""
        for _ in self:
            pass
        return [
            Generated(
                text=answer.text,
                tokens=tuple(answer.tokens),
                reason=answer.reason or "cancelled",
                stop=answer.stop,
                prompt_tokens=len(ids),
                prefilled=prefilled,
                prefill_seconds=self._prefill_seconds,
                decoded=self._decoded,
                decode_seconds=self._decode_seconds,
                skipped=self._skipped,
            )
            for answer, ids, prefilled in zip(self._answers, self._prompts, self._prefilled, strict=True)
        ]

    def _run(self) -> Generator[str, None, None]:
        if not self._keep:
            self._engine.reset()
        since = self._engine.counts()
        try:
            yield from self._made()
            for answer in self._answers:
                if rest := answer.rest():
                    yield rest
        finally:
            self._skipped = self._engine.skipped(since)

    def _made(self) -> Iterator[str]:
        """Tokens of all texts, until each has a reason to end or nobody wants them."""
        engine, going, chosen = self._engine, list(range(len(self._prompts))), list[int]()
        for made in range(self._options.tokens):
            for n in going if made else ():
                if engine.positions[n] == engine.context:
                    self._answers[n].reason = "context"
            going = self._unended(going)
            if not going or self._unwanted():
                return
            chosen = self._step(chosen, going) if made else self._first()
            for n in going:
                self._samplers[n].check()
                if piece := self._answers[n].take(chosen[n]):
                    yield piece
            going = self._unended(going)
        for n in going:
            self._answers[n].reason = "tokens"

    def _unended(self, texts: Sequence[int]) -> list[int]:
        return [n for n in texts if not self._answers[n].reason]

    def _first(self) -> list[int]:
        """Prefill each prompt and choose its first token."""
        began, chosen = time.perf_counter(), []
        for n, ids in enumerate(self._prompts):
            kept = self._engine.keep(ids, n) if self._keep else 0
            self._prefilled[n] = len(ids) - kept
            chosen.append(self._samplers[n].choose(self._engine.prefill(ids[kept:], n)))
        self._prefill_seconds = time.perf_counter() - began
        return chosen

    def _step(self, chosen: Sequence[int], going: Sequence[int]) -> list[int]:
        """Append the token that was chosen to each text, and choose the next. A text that has ended costs the others
        little: what its sequence still computes, from an empty cache, is not looked at."""
        began = time.perf_counter()
        for n in set(range(len(self._prompts))) - set(going):
            self._engine.truncate(0, n)
        chosen = self._engine.decode_all(chosen, self._samplers)
        self._decode_seconds += time.perf_counter() - began
        self._decoded += len(going)
        return chosen


def generate(
    engine: Engine, tokenizer: Tokenizer, prompt: str, options: GenerateOptions | None = None, *, keep: bool = False
) -> Generation:
    """Continue a prompt. The prompt runs dense, all later tokens sparse.

    tokenizer -- the model's: `open_tokenizer(PackedModel.tokenizer_json)`
    prompt    -- BOS goes before it where the model has one; may then be empty
    keep      -- go on from what the engine's text and the prompt begin with, so that only the rest is prefilled (a
                 conversation); otherwise the engine forgets its text, and the same prompt gives the same text

    Raises `UserError`, before anything runs, for a prompt that is empty without a BOS, longer than the context or not
    text, and for options out of range.
    """
    options = checked(options)
    return Generation(engine, tokenizer, [_fitting_prompt(engine, tokenizer, prompt)], options, keep)


def generate_together(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], options: GenerateOptions | None = None
) -> list[Generated]:
    """Continue a prompt in each of an engine's sequences, as `generate` does. Raises as `generate`, before anything
    runs."""
    options = checked(options)
    ids = [_fitting_prompt(engine, tokenizer, prompt) for prompt in prompts]
    return Generation(engine, tokenizer, ids, options).results()


class _Answer:
    """One continuation while it is made: its tokens, its text, and what ended it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], options: GenerateOptions, eos: Sequence[int]
    ) -> None:
        self._stream, self._stops, self._eos = TextStream(tokenizer, prompt), StopText(options.stop), eos
        special = tokenizer.get_added_tokens_decoder() if options.stop else {}
        # Special tokens have no text of their own in the answer.
        self._stop_ids = {id: t.content for id, t in special.items() if t.special and t.content in options.stop}
        self._told: list[str] = []
        self.tokens: list[int] = []
        self.reason = ""
        self.stop: str | None = None

    @property
    def text(self) -> str:
        """What was told."""
        return "".join(self._told)

    def take(self, id: int) -> str:
        """Add a token. Returns the text that is certain now; `reason` is there once it was the last."""
        if id in self._eos and id not in self._stop_ids:
            self.reason = "eos"
            return ""
        self.tokens.append(id)
        if id in self._stop_ids:
            self.reason, self.stop = "stop", self._stop_ids[id]
            return ""
        return self._tell(self._stops.push(self._stream.push(id)))

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        held = "" if self._stops.found else self._stops.push(self._stream.finish()) + self._stops.finish()
        return self._tell(held)

    def _tell(self, piece: str) -> str:
        if self._stops.found is not None:
            self.reason, self.stop = "stop", self._stops.found
        if piece:
            self._told.append(piece)
        return piece


def open_tokenizer(tokenizer_json: str) -> Tokenizer:
    """A tokenizer from the content of its file; raises `ArtifactError` where it is damaged."""
    try:
        check_tokenizer(tokenizer_json)
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"the artifact's tokenizer.json cannot be read ({error}); pack the model again") from error


def prompt_tokens(tokenizer: Tokenizer, prompt: str, bos: int | None) -> list[int]:
    """A prompt's ids, BOS first where the model has one, once also where the prompt spells it itself.

    Raises `UserError` where that leaves no token, or the prompt is not text.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"prompt: not text (character {error.start} is half a character); expected UTF-8") from error
    # Of its methods this one lets other threads run meanwhile.
    (encoding,) = tokenizer.encode_batch_fast([prompt], add_special_tokens=False)
    ids: list[int] = encoding.ids
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    if not ids:
        raise UserError("empty prompt: this model has no token that begins a text (BOS); give at least one word")
    return ids


def checked(options: GenerateOptions | None) -> GenerateOptions:
    """The options, the usual ones for None. Raises `UserError` where one is out of range."""
    options = options or GenerateOptions()
    if options.tokens < 0:
        raise UserError(f"{options.tokens} tokens to generate: expected 0 or more")
    _sampling(options)
    StopText(options.stop)
    return options


def _sampling(options: GenerateOptions, number: int = 0) -> Sampling:
    """How the tokens of prompt `number` are chosen."""
    sampling = Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})
    return replace(sampling, seed=options.seed + number)


def _fitting_prompt(engine: Engine, tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids = prompt_tokens(tokenizer, prompt, engine.architecture.bos)
    if len(ids) > engine.context:
        larger = " or give a larger context" if engine.context < engine.architecture.context else ""
        raise UserError(f"prompt of {len(ids)} tokens: the context holds {engine.context}; shorten it{larger}")
    return ids

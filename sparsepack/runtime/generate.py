"""Talk to a packed model: a prompt in, text out as it is made."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from sparsepack.errors import ArtifactError, UserError
from sparsepack.models.records.skipped import Skipped
from sparsepack.models.tokenizer.tokenizer_check import check_tokenizer
from sparsepack.runtime.detokenise import TextStream
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import GenerateOptions
from sparsepack.runtime.sampling import Sampler, Sampling
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
    """A text that is being made: pieces of it, never a part of a character, until it ends.

    `result` says how it ended, and makes what is left where some is. `close` ends it early. The engine works for one
    generation at a time: a new one takes it away from an old one.

    unwanted -- asked before every step: whether to end here, as `close` does
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        options: GenerateOptions,
        keep: bool,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._unwanted = unwanted
        self._engine, self._ids, self._options, self._keep = engine, list(ids), options, keep
        self._sampler = Sampler(_sampling(options), ids)
        self._answer = _Answer(tokenizer, ids, options, engine.architecture.eos)
        self._prefilled, self._decoded = 0, 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._skipped: Skipped | None = None
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End it here; `result` is what was made until now."""
        self._pieces.close()

    def result(self) -> Generated:
        """The whole, once it has ended: runs what is left."""
        for _ in self:
            pass
        return Generated(
            text=self._answer.text,
            tokens=tuple(self._answer.tokens),
            reason=self._answer.reason or "cancelled",
            stop=self._answer.stop,
            prompt_tokens=len(self._ids),
            prefilled=self._prefilled,
            prefill_seconds=self._prefill_seconds,
            decoded=self._decoded,
            decode_seconds=self._decode_seconds,
            skipped=self._skipped,
        )

    def _run(self) -> Generator[str, None, None]:
        engine, answer = self._engine, self._answer
        if not self._keep:
            engine.reset()
        since = engine.counts()
        id = 0
        try:
            for made in range(self._options.tokens):
                if made and engine.position == engine.context:
                    answer.reason = "context"
                    break
                if self._unwanted():
                    break
                id = self._step(id) if made else self._first()
                if piece := answer.take(id):
                    yield piece
                if answer.reason:
                    break
            else:
                answer.reason = "tokens"
            if rest := answer.rest():
                yield rest
        finally:
            self._skipped = engine.skipped(since)

    def _first(self) -> int:
        began = time.perf_counter()
        kept = self._engine.keep(self._ids) if self._keep else 0
        self._prefilled = len(self._ids) - kept
        id = self._sampler.choose(self._engine.prefill(self._ids[kept:]))
        self._prefill_seconds = time.perf_counter() - began
        return id

    def _step(self, id: int) -> int:
        began = time.perf_counter()
        id = self._engine.decode_next(id, self._sampler)
        self._decode_seconds += time.perf_counter() - began
        self._decoded += 1
        return id


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
    return Generation(engine, tokenizer, _fitting_prompt(engine, tokenizer, prompt), options, keep)


def generate_together(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], options: GenerateOptions | None = None
) -> list[Generated]:
    """Continue a prompt in each of an engine's sequences, as `generate` does.

    Prompt n draws by the seed + n. A text that has ended costs the others little: what its sequence still computes,
    from an empty cache, is not looked at. Raises as `generate`, before anything runs.
    """
    options = checked(options)
    ids = [_fitting_prompt(engine, tokenizer, prompt) for prompt in prompts]
    samplers = [Sampler(_sampling(options, n), prompt) for n, prompt in enumerate(ids)]
    answers = [_Answer(tokenizer, prompt, options, engine.architecture.eos) for prompt in ids]
    engine.reset()
    began = time.perf_counter()
    going = set(range(len(prompts))) if options.tokens else set()
    chosen = [samplers[n].choose(engine.prefill(ids[n], n)) for n in sorted(going)]
    prefill_seconds, began = time.perf_counter() - began, time.perf_counter()
    decoded = 0
    for count in range(1, options.tokens + 1):
        for n in sorted(going):
            answers[n].take(chosen[n])
            if not answers[n].reason and count < options.tokens and engine.positions[n] == engine.context:
                answers[n].reason = "context"
            if answers[n].reason or count == options.tokens:
                going.remove(n)
        if not going:
            break
        for n in set(range(len(prompts))) - going:
            engine.truncate(0, n)
        chosen = engine.decode_all(chosen, samplers)
        decoded += len(going)
    for answer in answers:
        answer.reason = answer.reason or "tokens"
        answer.rest()
    decode_seconds, skipped = time.perf_counter() - began, engine.skipped()
    return [
        Generated(
            text=answer.text,
            tokens=tuple(answer.tokens),
            reason=answer.reason or "tokens",
            stop=answer.stop,
            prompt_tokens=len(prompt),
            prefilled=len(prompt) if options.tokens else 0,
            prefill_seconds=prefill_seconds,
            decoded=decoded,
            decode_seconds=decode_seconds,
            skipped=skipped,
        )
        for answer, prompt in zip(answers, ids, strict=True)
    ]


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
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
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
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n,
    )
    return replace(sampling, seed=options.seed + number)


def _fitting_prompt(engine: Engine, tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids = prompt_tokens(tokenizer, prompt, engine.architecture.bos)
    if len(ids) > engine.context:
        larger = " or give a larger context" if engine.context < engine.architecture.context else ""
        raise UserError(f"prompt of {len(ids)} tokens: the context holds {engine.context}; shorten it{larger}")
    return ids

"""Text from a packed model: prompts as tokens, samplings as the makers of models suggest, and what an engine makes of
both."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from sparsepack.errors import ArtifactError, UserError
from sparsepack.models.activity import Skipped
from sparsepack.models.tokenizer.sandbox import SandboxError, SandboxTokenizer, check_decoder
from sparsepack.models.tokenizer.tokenizer import check_tokenizer
from sparsepack.models.tokenizer.tokens import bos_tokens, check_ids, encode
from sparsepack.option import default_of, idle, options_of
from sparsepack.runtime.engine import Counts, Engine
from sparsepack.runtime.generation.continuation import Continuation, StopText, sampling_of
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.runtime.generation.speculation import MOST_DRAFTED, PromptLookup, decode_drafts
from sparsepack.runtime.options import GREEDY, GenerateOptions

_DECLARED = options_of(GenerateOptions)
_OF_DRAWING = {name for name, each in _DECLARED.items() if any(one.field == "temperature" for one in each.counts)}


def apply_suggestions(options: GenerateOptions, suggested: Mapping[str, Any]) -> tuple[GenerateOptions, dict[str, Any]]:
    """The options with the model's suggestions for what nobody gave, and which these are.

    suggested -- `formats.packed.PackedModel.generation`

    Where the likeliest token is taken, nothing is suggested of how tokens are drawn.
    """
    taken = {name: value for name, value in suggested.items() if getattr(options, name) is None}
    temperature = taken.get("temperature") if options.temperature is None else options.temperature
    if not temperature:
        taken = {name: value for name, value in taken.items() if name not in _OF_DRAWING}
    return replace(options, **taken), taken


def describe_suggestions(taken: Mapping[str, Any], spelt: Callable[[str], str] = str) -> str:
    """What the model's makers suggest, in words; `spelt` writes a field as the user knows it."""
    shown = ", ".join(f"{spelt(name)} {value:g}" for name, value in taken.items())
    return f"the model's makers suggest {shown}; {spelt('temperature')} 0 takes the likeliest token each time"


def check_generate_options(options: GenerateOptions | None, spelt: Callable[[str], str] = str) -> GenerateOptions:
    """The options, the usual ones for None. Raises `UserError` where one is out of range, or was given and does
    nothing; `spelt` writes a field as the user knows it."""
    options = options or GenerateOptions()
    if options.tokens < 0:
        raise UserError(f"{options.tokens} tokens to generate: expected 0 or more")
    sampling_of(options)
    StopText(options.stop)
    values = {name: getattr(options, name) for name in _DECLARED}
    given = [name for name, value in values.items() if value != default_of(GenerateOptions, name)]
    values |= {name: value for name, value in GREEDY.items() if values[name] is None}
    for line in idle(given, values.get, lambda name: _DECLARED[name].counts, spelt):
        raise UserError(line)
    return options


@dataclass(frozen=True)
class Generated:
    """A continuation, and how it was made.

    text          -- what was made, without the stop string
    tokens        -- its ids, those of the stop string included, the model's end of text not
    reason        -- why it ended: "eos" (the model ended it), "stop" (a stop string came), "tokens" (as many as asked
                     for), "context" (it is full), "cancelled" (nobody asked for the rest, or a newer
                     generation has the engine)
    stop          -- the stop string that came
    prompt_tokens -- of the prompt; prefilled -- how many of them were not in the cache yet
    decoded       -- steps after the prefill, each of one token; with several texts together, of all of them
    skipped       -- what the steps skipped; None without one, and where a newer generation has the engine
    drafted, accepted -- tokens that prompt look-up drafted, and those of them that the model chose
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
    drafted: int = 0
    accepted: int = 0

    def __repr__(self) -> str:
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tokens/s"
        return f"Generated({self.text[:60]!r}, {len(self.tokens)} tokens, ended by {self.reason}{speed})"

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second, the prefill and what the caller did in between left out; None without one."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds else None


class Generation(Iterator[str]):
    """Texts that are being made, one in each of an engine's sequences: pieces, never a part of a character, until all
    of them end. With one text the pieces are that text.

    `result` says how the text has ended, and makes what is left where some is; `results` says so of each text. `close`
    ends them early. The engine works for one generation at a time: a newer one ends an older one that has begun, which
    then says "cancelled". Other threads wait while `results` runs; where a thread has begun a generation and neither
    ended, closed nor dropped it, they raise `UserError`.

    prompts  -- ids of each prompt, at most as many as the engine has sequences; prompt n draws by the seed + n
    keep     -- whether to go on from what the engine has of each prompt; otherwise the engine forgets its texts
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        options: GenerateOptions,
        keep: bool = False,
    ) -> None:
        self._engine, self._keep = engine, keep
        self._texts = [Continuation(engine, tokenizer, ids, options, n) for n, ids in enumerate(prompts)]
        self._prefilled, self._decoded = [0] * len(prompts), 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._skipped: Skipped | None = None
        self._since: Counts | None = None  # what the engine had counted when this began
        self._chosen: Sequence[int | None] = ()
        self._pieces: deque[str] = deque()
        self._lookup = _new_lookup(engine, prompts, options)
        self._drafted = self._accepted = 0
        self._closed = False
        with engine.lock:
            engine.claim()

    def __next__(self) -> str:
        with self._engine.lock:
            try:
                while not self._pieces and not self._closed and self._going:
                    self._advance()
            except BaseException:
                self.close()
                raise
            if self._pieces:
                return self._pieces.popleft()
            self.close()
            raise StopIteration

    def close(self) -> None:
        """End it here; `result` is what was made until now."""
        with self._engine.lock:
            if self._since is not None and not self._closed and self._engine.owned_by(self):
                self._skipped = self._engine.skipped(self._since)
                self._engine.release(self)
            self._pieces.clear()
            self._closed = True

    def result(self) -> Generated:
        """The whole of the one text, once it has ended: runs what is left."""
        return self.results()[0]

    def results(self) -> list[Generated]:
        """Each text, once all have ended: runs what is left, while other threads wait."""
        with self._engine.lock:
            for _ in self:
                pass
        return [
            Generated(
                text=text.text,
                tokens=tuple(text.tokens),
                reason=text.reason or "cancelled",
                stop=text.stop,
                prompt_tokens=len(text.ids),
                prefilled=prefilled,
                prefill_seconds=self._prefill_seconds,
                decoded=self._decoded,
                decode_seconds=self._decode_seconds,
                skipped=self._skipped,
                drafted=self._drafted,
                accepted=self._accepted,
            )
            for text, prefilled in zip(self._texts, self._prefilled, strict=True)
        ]

    @property
    def _going(self) -> list[int]:
        """The numbers of the texts that have no reason to end."""
        return [n for n, text in enumerate(self._texts) if not text.reason]

    def _advance(self) -> None:
        """Make a token of each text that goes on; end where the engine works for another generation."""
        going = self._going
        if self._since is None:
            self._begin()
        elif not self._engine.owned_by(self):
            self._closed = True
            return
        if self._chosen and self._lookup and (drafts := self._drafts(self._lookup)):
            self._step_drafts(drafts)
            return
        self._chosen = self._step(going) if self._chosen else self._first()
        for n in going:
            if piece := self._texts[n].take(_there(self._chosen[n])):
                self._pieces.append(piece)

    def _begin(self) -> None:
        self._engine.claim()
        if not self._keep:
            self._engine.reset()
        self._engine.claim(self)
        self._since = self._engine.counts()

    def _first(self) -> list[int]:
        """Prefill each prompt and choose its first token."""
        began, chosen = time.perf_counter(), []
        for n, text in enumerate(self._texts):
            kept = self._engine.keep(text.ids, n) if self._keep else 0
            self._prefilled[n] = len(text.ids) - kept
            chosen.append(text.sampler.choose(self._engine.prefill(text.ids[kept:], n)))
        self._prefill_seconds = time.perf_counter() - began
        return chosen

    def _step(self, going: Sequence[int]) -> list[int | None]:
        """Append the token that was chosen to each text that goes on, and choose the next."""
        self._engine.prepare()  # which is no part of a token's time
        began = time.perf_counter()
        ids: list[int | None] = [None] * len(self._engine.positions)
        samplers: list[Sampler | None] = [None] * len(ids)
        for n in going:
            ids[n], samplers[n] = self._chosen[n], self._texts[n].sampler
        chosen = self._engine.decode_all(ids, samplers)
        self._decode_seconds += time.perf_counter() - began
        self._decoded += len(going)
        return chosen

    def _drafts(self, lookup: PromptLookup) -> list[int]:
        """What is expected after the token that was chosen, as far as there is room for it."""
        (text,), began = self._texts, time.perf_counter()
        room = min(text.left, self._engine.context - self._engine.position) - 1
        drafts = lookup.drafts(text.tokens, room)
        self._decode_seconds += time.perf_counter() - began
        return drafts

    def _step_drafts(self, drafts: Sequence[int]) -> None:
        """Append the token that was chosen and what of the drafts is chosen after it."""
        (text,), began = self._texts, time.perf_counter()
        before, beside = len(text.tokens), 0.0

        def take(id: int) -> bool:
            nonlocal beside
            at = time.perf_counter()
            self._chosen = [id]
            if piece := text.take(id):
                self._pieces.append(piece)
            beside += time.perf_counter() - at
            return not text.reason

        self._drafted += len(drafts)
        self._accepted += decode_drafts(self._engine, _there(self._chosen[0]), drafts, text.sampler, take)
        self._decode_seconds += time.perf_counter() - began - beside
        self._decoded += len(text.tokens) - before + (text.reason == "eos")


def _new_lookup(engine: Engine, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> PromptLookup | None:
    """What drafts, where the options have it; unless they say, where nothing is skipped. Raises `UserError` where it
    cannot be, and they have it."""
    most = options.prompt_lookup
    if most == 0:
        return None
    several = "texts that are decoded together fill a step already; give one prompt alone"
    reason = several if len(engine.positions) > 1 or len(prompts) > 1 else engine.positions_unsupported
    if reason and most is not None:
        raise UserError(f"prompt-lookup: {reason}; leave it out")
    if reason:
        return None
    skips = bool(engine.packed.rules) and not engine.dense
    if most is None:
        most = 0 if skips else MOST_DRAFTED
    return PromptLookup(prompts[0], most, skips) if most else None


def _there(id: int | None) -> int:
    assert id is not None
    return id


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    options: GenerateOptions | None = None,
    *,
    keep: bool = False,
) -> Generation:
    """Continue a prompt. The prompt runs dense, all later tokens sparse.

    tokenizer -- the model's: `open_tokenizer(PackedModel.tokenizer_json)`
    prompt    -- as `prompt_tokens` takes it; or its ids
    keep      -- go on from what the engine's text and the prompt begin with, so that only the rest is prefilled (a
                 conversation); otherwise the engine forgets its text, and the same prompt gives the same text

    Raises `UserError`, before anything runs, as `prompt_tokens`, for a prompt that is longer than the context, and for
    options out of range.
    """
    options = check_generate_options(options)
    return Generation(engine, tokenizer, [_fitting_prompt(engine, tokenizer, prompt)], options, keep)


def generate_together(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    options: GenerateOptions | None = None,
) -> list[Generated]:
    """Continue a prompt in each of an engine's sequences, as `generate` does. Raises as `generate`, before anything
    runs."""
    options = check_generate_options(options)
    ids = [_fitting_prompt(engine, tokenizer, prompt) for prompt in prompts]
    return Generation(engine, tokenizer, ids, options).results()


def open_tokenizer(tokenizer_json: str) -> Tokenizer:
    """A tokenizer from the content of its file, which is used in a child process (`SandboxTokenizer`); raises
    `ArtifactError` where it is damaged."""
    try:
        read = check_tokenizer(tokenizer_json)
        check_decoder(read)
        return SandboxTokenizer(read, tokenizer_json)  # type: ignore[return-value]
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"the artifact's tokenizer.json cannot be read ({error}); pack the model again") from error


def prompt_tokens(
    tokenizer: Tokenizer,
    prompt: str,
    bos: int | None = None,
    vocabulary: int | None = None,
    from_template: bool = False,
) -> list[int]:
    """A prompt's ids: BOS first where the tokenizer puts it there, once also where the prompt spells it itself.

    bos           -- the model's BOS, for a tokenizer that does not say what it puts before a text
    vocabulary    -- how many tokens the model has; None: that is not checked
    from_template -- a chat template made the prompt, and wrote its beginning itself

    Raises `UserError` where that leaves no token, the prompt is not text or spells a token that the model has not.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"prompt: not text (character {error.start} is half a character); expected UTF-8") from error
    try:
        ids = encode(tokenizer, prompt, [] if from_template else bos_tokens(tokenizer, bos))
    except SandboxError as error:
        raise UserError(f"prompt: the model's tokenizer cannot take this text ({error})") from error
    if not ids:
        raise UserError(
            "empty prompt: this model's tokenizer puts no token before a text (BOS); give at least one word"
        )
    if vocabulary is not None:
        check_ids(tokenizer, ids, vocabulary, "prompt")
    return ids


def _fitting_prompt(engine: Engine, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    ids = prompt_tokens(tokenizer, prompt, engine.architecture.bos) if isinstance(prompt, str) else list(prompt)
    if len(ids) > engine.context:
        larger = " or give a larger context" if engine.context < engine.architecture.context else ""
        raise UserError(f"prompt of {len(ids)} tokens: the context holds {engine.context}; shorten it{larger}")
    return ids

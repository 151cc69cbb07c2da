"""Talk to a packed model: a prompt in, text out as it is made."""

from collections.abc import Generator, Sequence

from tokenizers import Tokenizer

from sparsepack.errors import ArtifactError, UserError
from sparsepack.runtime.batch import BatchEngine
from sparsepack.runtime.detokenise import TextStream
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.sampling import Sampler, Sampling


def generate(
    engine: Engine,
    tokenizer_json: str,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Generator[str, None, str]:
    """Continue a prompt. Yields pieces of text, never a part of a character; forgets the engine's text before.

    tokenizer_json        -- content of the model's tokenizer.json (`PackedModel.tokenizer_json`)
    prompt                -- BOS goes before it where the model has one; may then be empty
    max_tokens            -- to generate at most
    temperature, ..., top_p -- as in `Sampling`

    The prompt runs dense, all later tokens sparse. The generator's return value says why it ended: "eos" (the model
    ended the text), "tokens" (max_tokens are made) or "context" (the engine's context is full).

    Raises `UserError`, before anything runs, for a prompt that is empty without a BOS, longer than the context or not
    text, and for options out of range; `ArtifactError` for a tokenizer that cannot be read.
    """
    _check_count(max_tokens)
    sampler = Sampler(Sampling(temperature, top_k, top_p, seed))
    tokenizer = open_tokenizer(tokenizer_json)
    ids = _fitting_prompt(engine, tokenizer, prompt)
    return _stream(engine, TextStream(tokenizer, ids), sampler, ids, max_tokens)


def generate_together(
    engine: BatchEngine,
    tokenizer_json: str,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[str]:
    """Continue a prompt in each of an engine's sequences, as `generate` does; returns the continuations.

    Prompt n draws by `seed` + n. A text that has ended costs the others little: what its sequence still computes, from
    an empty cache, is not looked at. Raises as `generate`, before anything runs.
    """
    _check_count(max_tokens)
    samplers = [Sampler(Sampling(temperature, top_k, top_p, seed + n)) for n in range(len(prompts))]
    tokenizer = open_tokenizer(tokenizer_json)
    ids = [_fitting_prompt(engine, tokenizer, prompt) for prompt in prompts]
    texts = [TextStream(tokenizer, prompt) for prompt in ids]
    made = ["" for _ in prompts]
    engine.reset()
    going = set(range(len(prompts))) if max_tokens else set()
    chosen = [samplers[n].choose(engine.prefill(n, ids[n])) for n in sorted(going)]
    for count in range(1, max_tokens + 1):
        for n in sorted(going):
            if chosen[n] in engine.architecture.eos:
                going.remove(n)
                continue
            made[n] += texts[n].push(chosen[n])
            if count == max_tokens or engine.positions[n] == engine.context:
                going.remove(n)
        if not going:
            break
        for n in set(range(len(prompts))) - going:
            engine.truncate(n, 0)
        chosen = engine.decode_next(chosen, samplers)
    return [piece + text.finish() for piece, text in zip(made, texts, strict=True)]


def open_tokenizer(tokenizer_json: str) -> Tokenizer:
    """A tokenizer from the content of its file; raises `ArtifactError` where it is damaged."""
    try:
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


def _check_count(max_tokens: int) -> None:
    if max_tokens < 0:
        raise UserError(f"{max_tokens} tokens to generate: expected 0 or more")


def _fitting_prompt(engine: Engine | BatchEngine, tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids = prompt_tokens(tokenizer, prompt, engine.architecture.bos)
    if len(ids) > engine.context:
        larger = " or give a larger context" if engine.context < engine.architecture.context else ""
        raise UserError(f"prompt of {len(ids)} tokens: the context holds {engine.context}; shorten it{larger}")
    return ids


def _stream(
    engine: Engine, text: TextStream, sampler: Sampler, ids: list[int], max_tokens: int
) -> Generator[str, None, str]:
    engine.reset()
    id, reason = 0, "tokens"
    for made in range(max_tokens):
        if made and engine.position == engine.context:
            reason = "context"
            break
        id = engine.decode_next(id, sampler) if made else sampler.choose(engine.prefill(ids))
        if id in engine.architecture.eos:
            reason = "eos"
            break
        if piece := text.push(id):
            yield piece
    if rest := text.finish():
        yield rest
    return reason

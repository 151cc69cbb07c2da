"""Windows of tokens over a text, the same for calibration and for rolling perplexity.

Window i of a text is its tokens `context * i` to `context * (i + 1)`, of the text as a whole; a last, shorter one is
left out. The first windows need only the beginning of the text. Windows drawn at random need all of it, since any
window can be drawn; of a long text, only `SAMPLE` characters are drawn from.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sparsepack.errors import TextError
from sparsepack.files.text import Text
from sparsepack.models.tokenizer.tokens import bos_tokens, check_ids, tokens_of

DEFAULT_CONTEXT = 2048
"""A window has this many tokens unless the user or the model says otherwise."""

SAMPLE = 1 << 23
"""Windows of a longer text are drawn from this many of its characters, unless so many windows need more."""
_STRETCH = 1 << 16
_LONG_TOKEN = 16
HELD_OUT_SHARE = 8
"""No more than one window of so many is held out of a text that is used whole."""
"""The tokens of no text have on average as many characters as this."""


def window_length(asked: int | None, made_for: int) -> int:
    """Tokens per window: what was asked for, or 2048, or what the model was made for if that is less."""
    return min(DEFAULT_CONTEXT, made_for) if asked is None else asked


def tokenise(tokenizer: Any, text: Text, most: int | None = None) -> torch.Tensor:
    """The text's first `most` token ids (None: all), without special tokens: int32 [T]."""
    return tokens_of(tokenizer, text).first(most)


def count_windows(tokenizer: Any, text: Text, context: int, most: int | None = None) -> int:
    """Windows in a text; no more than `most` are looked for."""
    return len(tokenise(tokenizer, text, None if most is None else most * context)) // context


def rolling_windows(
    tokenizer: Any, text: Text, context: int, most: int | None = None, vocabulary: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `most` windows (None: all), with what the model is to predict.

    vocabulary -- how many tokens the model has; None: that is not checked

    Returns inputs and targets, int64 [windows, positions]. With a BOS token, a window's input is BOS and its tokens
    but the last, and every token is a target; without one, each token but the first is.
    Raises `TextError` where the text is shorter than one window, and as `check_vocabulary`.
    """
    inputs, targets = inputs_and_targets(tokenizer, _windows(tokenizer, text, context, most).long())
    for tokens in (inputs, targets) if vocabulary is not None else ():
        check_vocabulary(tokenizer, tokens, vocabulary or 0, text)
    return inputs, targets


def inputs_and_targets(tokenizer: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a model reads of windows of tokens, int64 [windows, context], and what it is to predict, each int64
    [windows, positions]; see `rolling_windows`."""
    inputs = _inputs(tokenizer, tokens)
    return inputs, tokens if inputs.shape == tokens.shape else tokens[:, 1:]


def drawn_windows(
    tokenizer: Any, text: Text, context: int, samples: int, seed: int, held_out: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of `samples` windows drawn at random, int64 [windows, positions], and the tokens of up to
    `held_out` others, int64 [windows, context], both in the order of the text.

    All windows but those, where `samples` is 0 or there are no more. Else they are the first of a permutation of all
    windows by torch's generator with `seed`. Where the text is longer than `SAMPLE` characters, or than 16 for each
    token that is asked for if that is more, it is a sample of the text that is cut into windows. The windows held out
    are spread evenly over the others; of a text of which nothing else is left, they are at most 1/8 of all windows.
    Raises as `rolling_windows`.
    """
    if samples:
        text = sample(text, max(SAMPLE, samples * context * _LONG_TOKEN), seed)
    windows = _windows(tokenizer, text, context).long()
    drawn, held_out = drawn_and_held_out(len(windows), samples, held_out)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    rest = windows[order[drawn:].sort().values]
    return _inputs(tokenizer, windows[order[:drawn].sort().values]), spread_windows(rest, held_out)


def drawn_and_held_out(count: int, samples: int, held_out: int) -> tuple[int, int]:
    """Return how many of so many windows `drawn_windows` draws, and how many it holds out."""
    held_out = min(held_out, max(count - samples if samples else 0, count // HELD_OUT_SHARE))
    return min(samples or count, count - held_out), held_out


def sample(text: Text, characters: int, seed: int) -> Text:
    """So many characters of a text, or a shorter text itself.

    The text is cut into stretches of 65,536 characters, and the first of a permutation of them by torch's generator
    with `seed` are taken, in the order of the text, as if each were a document. A last, shorter one is never taken.
    """
    if text.characters <= characters:
        return text
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(text.characters // _STRETCH, generator=generator)
    chosen = set(order[: -(-characters // _STRETCH)].tolist())
    documents = tuple(stretch for number, stretch in enumerate(_stretches(text)) if number in chosen)
    return replace(text, documents=documents, count=len(documents), characters=len(documents) * (_STRETCH + 2) - 2)


def _stretches(text: Text) -> Iterator[str]:
    """The text cut into stretches of `_STRETCH` characters; the last one may be shorter."""
    waiting: list[str] = []
    missing = _STRETCH
    for piece in text.pieces():
        while len(piece) >= missing:
            yield "".join([*waiting, piece[:missing]])
            waiting, piece, missing = [], piece[missing:], _STRETCH
        waiting.append(piece)
        missing -= len(piece)
    yield "".join(waiting)


def check_vocabulary(tokenizer: Any, windows: torch.Tensor, size: int, text: Text) -> None:
    """Raise `TextError` where a text's windows have a token that a model of `size` tokens does not have."""
    if windows.numel():
        check_ids(tokenizer, [int(windows.max())], size, text.name, TextError)


def first_tokens(tokenizer: Any, text: Text, count: int, vocabulary: int) -> list[int]:
    """The first `count` ids of a text, or as many as there are, behind what the tokenizer puts before it. Raises
    `TextError` for one that a model of so many tokens does not have."""
    ids = [*bos_tokens(tokenizer), *tokenise(tokenizer, text, count).tolist()][:count]
    check_ids(tokenizer, ids, vocabulary, text.name, TextError)
    return ids


def spread_windows(windows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` of the windows [N, S], evenly spread over the text: int64 [min(count, N), S]."""
    chosen = torch.linspace(0, max(len(windows) - 1, 0), min(count, len(windows))).round().long()
    return windows[chosen].long()


def session_windows(tokenizer: Any, text: Text, context: int, count: int) -> tuple[torch.Tensor, list[int | None]]:
    """The inputs of `count` windows that have little to do with each other, in the order of the text: int64
    [windows, positions], and of each the number of the document that it is from.

    Each is from the middle of a document of its own, documents evenly spread; one that is too short gives way to the
    next. Where fewer documents than `count` are long enough, they are evenly spread over all windows of the text as a
    whole, and from no document. Raises as `rolling_windows`.
    """
    found = _middles(tokenizer, text, context, count) if text.count >= count else []
    if len(found) < count:
        windows = spread_windows(_windows(tokenizer, text, context), count)
        return _inputs(tokenizer, windows), [None] * len(windows)
    return _inputs(tokenizer, torch.stack([window for _, window in found])), [number for number, _ in found]


def _middles(tokenizer: Any, text: Text, context: int, count: int) -> list[tuple[int | None, torch.Tensor]]:
    """Documents by number, each with its middle `context` tokens: int64 [context]."""
    found: list[tuple[int | None, torch.Tensor]] = []
    for number, document in enumerate(text.documents):
        if len(found) < count and number >= len(found) * text.count // count:
            alone = replace(text, documents=(document,), count=1)
            ids = tokenise(tokenizer, alone)
            start = (len(ids) - context) // 2
            if start >= 0:
                found.append((number, ids[start : start + context].long()))
    return found


def _windows(tokenizer: Any, text: Text, context: int, most: int | None = None) -> torch.Tensor:
    """The windows of a text, without special tokens: int32 [windows, context]. Raises as `rolling_windows`."""
    ids = tokenise(tokenizer, text, None if most is None else most * context)
    count = len(ids) // context
    if count == 0:
        raise TextError(
            f"{text.name}: {len(ids)} tokens are fewer than one window of {context}; "
            "give a longer text or a smaller --context"
        )
    return ids[: count * context].reshape(count, context)


def _inputs(tokenizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The inputs of windows [N, context]: [N, context], or without a BOS [N, context - 1].

    A window is a piece of a text and no prompt: it has the BOS that the tokenizer names, also where prompts have none,
    as lm-eval has it (`prefix_token_id`).
    """
    named = getattr(tokenizer, "bos_token_id", None)
    bos = bos_tokens(tokenizer)[-1:] or ([] if named is None else [named])
    before = torch.tensor(bos, dtype=tokens.dtype).expand(len(tokens), -1)
    return torch.cat([before, tokens[:, :-1]], 1)

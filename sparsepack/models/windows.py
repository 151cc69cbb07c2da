"""Windows of tokens over a text, the same for calibration and for rolling perplexity."""

from typing import Any

import torch

from sparsepack.errors import TextError
from sparsepack.files.text import Text

DEFAULT_CONTEXT = 2048
"""Tokens per window unless the user or the model says otherwise."""


def window_length(asked: int | None, made_for: int) -> int:
    """Tokens per window: what was asked for, or 2048, or what the model was made for if that is less."""
    return min(DEFAULT_CONTEXT, made_for) if asked is None else asked


def tokenise(tokenizer: Any, text: Text) -> list[int]:
    """The whole text as token ids, without special tokens."""
    # verbose=False: a text longer than the model's context is what windows are for, no reason to warn.
    return list(tokenizer(text.joined, add_special_tokens=False, verbose=False)["input_ids"])


def rolling_windows(tokenizer: Any, text: Text, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a text into consecutive windows of `context` tokens; a last, shorter one is left out.

    Returns inputs and targets, int64 [windows, positions]. With a BOS token, a window's input is BOS and its tokens
    but the last, and every token is a target; without one, each token but the first is.
    Raises `TextError` where the text is shorter than one window.
    """
    ids = tokenise(tokenizer, text)
    count = len(ids) // context
    if count == 0:
        raise TextError(
            f"{text.name}: {len(ids)} tokens are fewer than one window of {context}; "
            "give a longer text or a smaller --context"
        )
    tokens = torch.tensor(ids[: count * context]).reshape(count, context)
    if tokenizer.bos_token_id is None:
        return tokens[:, :-1], tokens[:, 1:]
    bos = torch.full((count, 1), tokenizer.bos_token_id)
    return torch.cat([bos, tokens[:, :-1]], 1), tokens


def spread_windows(windows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` of the windows [N, S], evenly spread over the text: int64 [min(count, N), S]."""
    chosen = torch.linspace(0, len(windows) - 1, min(count, len(windows))).round().long()
    return windows[chosen].long()

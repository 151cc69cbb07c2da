"""How likely tokens were, in the forms of completions and of chats."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from sparsepack.runtime.generation.sampling import TokenLogprob

Bytes = Callable[[int], bytes]
"""What a token stands for, by its id."""

Likelihoods = Callable[[Sequence[TokenLogprob]], dict[str, Any]]
"""What a choice or a chunk says of the next tokens of one text."""


def completion_likelihoods(bytes_of: Bytes) -> Likelihoods:
    """Lists of the same length, one element for each token. `top_logprobs` has the token itself, too. A token's offset
    is the number of characters that are whole before it."""
    decoder, told = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def offset_of(token: TokenLogprob) -> int:
        nonlocal told
        before, told = told, told + len(decoder.decode(bytes_of(token.id)))
        return before

    def said(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [_text(bytes_of(token.id)) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_text(bytes_of(id)): logprob for id, logprob in ((token.id, token.logprob), *reversed(token.top))}
                for token in tokens
            ],
            "text_offset": [offset_of(token) for token in tokens],
        }

    return said


def chat_likelihoods(bytes_of: Bytes) -> Likelihoods:
    """A record for each token."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        found = bytes_of(id)
        return {"token": _text(found), "logprob": logprob, "bytes": list(found)}

    def said(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    return said


def _text(found: bytes) -> str:
    """Bytes as text; those of half a character show as U+FFFD."""
    return found.decode(errors="replace")

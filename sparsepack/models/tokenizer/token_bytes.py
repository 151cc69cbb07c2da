"""What bytes a token stands for, and how many it can stand for at most."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

_SPACE = "\u2581"
_KEEPS_ALL = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"))
"""These steps cut a text into words and drop nothing of it, unless their `behavior` is to remove what they find."""

_COMPOSED = 4
"""NFC makes one character out of several; a Korean syllable of nine bytes becomes one of three."""


class TokenBytes:
    """The bytes of a tokenizer's tokens.

    tokenizer -- byte-level BPE, or pieces of SentencePiece with or without a fallback to bytes

    most -- how many bytes of a text become one token at most; None where no number can be told, because a part of the
            text may come to nothing: the tokenizer removes or changes characters, or has none for some
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        read: Mapping[str, Any] = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._added = {id: str(token.content) for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_level = any(
            step["type"] == "ByteLevel" for part in ("pre_tokenizer", "normalizer") for step in _steps(read.get(part))
        )
        self.most = self._longest(read)  # what was read is large, and not kept

    def of(self, id: int) -> bytes:
        """The bytes of a token; none where there is no such token."""
        if id in self._added:
            return self._added[id].encode()
        token = self._tokenizer.id_to_token(id)
        return b"" if token is None else self._decoded(token)

    def _longest(self, read: Mapping[str, Any]) -> int | None:
        normalizing, cutting = (list(_steps(read.get(part))) for part in ("normalizer", "pre_tokenizer"))
        factor = _COMPOSED if any(step["type"] == "NFC" for step in normalizing) else 1
        whole = (
            (self._byte_level or read["model"].get("byte_fallback"))
            and all(_lengthens(step) for step in normalizing)
            and all(step["type"] in _KEEPS_ALL and step.get("behavior") != "Removed" for step in cutting)
            and not any(token["lstrip"] or token["rstrip"] for token in read.get("added_tokens", ()))
            and not read.get("truncation")
        )
        if not whole:
            return None
        tokens = self._tokenizer.get_vocab()
        return factor * max(len(self._decoded(token)) for token in tokens)

    def _decoded(self, token: str) -> bytes:
        if self._byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a part of tokenizer.json, those within a sequence one by one."""
    if part is None:
        return
    within = part.get("normalizers") or part.get("pretokenizers")
    if part["type"] != "Sequence":
        yield part
    for step in within or ():
        yield from _steps(step)


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Whether a step of normalizing leaves at least as many bytes as it finds, but for NFC."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(found.encode()) <= len(step["content"].encode())
    return step["type"] in ("ByteLevel", "NFC", "Prepend")


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: the printable character that byte-level BPE writes for each byte."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_of_characters()

"""From text to ids: the only place where a tokenizer is given a text.

A prompt is tokenised at once (`encode`), a long text piece by piece and only as far as it is needed (`tokens_of`); what
the tokenizer puts before either is `bos_tokens`. A text is never truncated or padded, whatever a tokenizer.json has
saved of its training, and an id that the model has no embedding for is refused (`check_ids`).

What a tokenizer makes of a text depends on what stands before and after, but not on what stands far away. So the text
is cut into pieces that overlap, which are tokenised side by side, and two neighbours are joined at a seam: a place in
their overlap where both begin a token, with the same tokens around it. The tokens are those of the whole text, while
memory holds a few pieces. Where no place will do (one endless word), the two pieces become one.

And back: what bytes a token stands for, and how many it can stand for at most (`TokenBytes`).
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordLevel

from sparsepack.errors import UserError
from sparsepack.files.hashing import sha256_bytes
from sparsepack.files.text import Text
from sparsepack.models.tokenizer.sandbox import SandboxTokenizer
from sparsepack.progress import Advance, progress

PIECE = 1 << 16
"""The next piece begins this many characters after the beginning of a piece."""
OVERLAP = 1 << 11
"""A piece shares this many characters with the next one."""
AGREEING = 16
"""This many tokens on either side of a seam must be the same in both pieces."""
_AT_ONCE = 16
"""This many pieces are tokenised together, one a thread."""


_ONE_TOKEN = Tokenizer(WordLevel({"a": 0}, unk_token="a")).encode("a")


def backend_of(tokenizer: Any) -> Tokenizer:
    """The tokenizer of the library `tokenizers` in one of transformers, or itself, which takes texts whole from now
    on."""
    backend: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend


def bos_tokens(tokenizer: Any, unsaid: int | None = None) -> list[int]:
    """The ids that a tokenizer puts before a text: BOS or none, whatever token is called BOS.

    unsaid -- what is put there where the tokenizer has no post-processor to say so, as in artifacts of older versions
    """
    processor = backend_of(tokenizer).post_processor
    if processor is None:
        return [] if unsaid is None else [unsaid]
    around: Encoding = processor.process(_ONE_TOKEN)
    return list(around.ids[: around.special_tokens_mask.index(0)])


def encode(tokenizer: Any, text: str, before: Sequence[int] = ()) -> list[int]:
    """The ids of a text, all of it, behind `before`, whose last is not repeated where the text spells it itself.

    What a tokenizer would put behind a text, as some do that were saved after training, is left out: the text goes on.
    """
    # Of its methods this one lets other threads run meanwhile.
    (encoding,) = backend_of(tokenizer).encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return [*(before[:-1] if before[-1:] == ids[:1] else before), *ids]


def check_ids(
    tokenizer: Any, ids: Iterable[int], vocabulary: int, what: str, error: type[UserError] = UserError
) -> None:
    """Raise `error` where a text spells a token beyond the embedding of a model with so many tokens: some tokenizers
    have more special tokens than the model has rows.

    what -- the text, for the message
    """
    largest = max(ids, default=-1)
    if largest >= vocabulary:
        token = backend_of(tokenizer).id_to_token(largest)
        if token is None:
            raise error(
                f"{what}: token {largest} is beyond the model's vocabulary of {vocabulary}; the tokenizer does not fit "
                "the model"
            )
        raise error(
            f"{what}: it spells {token!r}, token {largest}; expected tokens below {vocabulary:,}, for which this model "
            "has embeddings; take it out of the text"
        )


class Tokens:
    """The ids of a text, as many as anybody has asked for so far: four bytes each. `complete` when that is all."""

    def __init__(self, tokenizer: Tokenizer, text: Text) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._begin()

    def _begin(self) -> None:
        self._made = [np.empty(0, np.int32)]
        self._more = _joined(self._tokenizer, self._text.pieces())
        self._count = self._told = 0
        self.complete = False

    def first(self, most: int | None = None) -> torch.Tensor:
        """The first `most` ids, or all (None), or as many as there are: int32 [T]."""
        if not self.complete and (most is None or self._count < most):
            with progress("tokenising, characters", self._text.characters, self._told) as advance:
                try:
                    self._make(most, advance)
                except BaseException:
                    self._begin()  # a generator that raised has ended: what it made so far would pass for the whole
                    raise
            self._made = [np.concatenate(self._made)]
        return torch.from_numpy(self._made[0])[:most]

    def _make(self, most: int | None, advance: Advance) -> None:
        while most is None or self._count < most:
            made = next(self._more, None)
            if made is None:
                self.complete = True
                return
            ids, characters = made
            self._made.append(ids)
            self._count += len(ids)
            self._told += characters
            advance(characters)


def tokens_of(tokenizer: Any, text: Text) -> Tokens:
    """The tokens of a text without special tokens, of any length, whatever the tokenizer's file says of that. Whoever
    asks again, with the same tokenizer, gets what there is.

    tokenizer -- of transformers, or of the tokenizers library
    """
    inner = backend_of(tokenizer)
    written = inner.to_str()
    key = ("tokens", sha256_bytes(written.encode()))
    if key not in text.known:
        # What a checkpoint's files say of cutting texts may take all time.
        in_child: Any = SandboxTokenizer(json.loads(written), written) if isinstance(inner, Tokenizer) else inner
        text.known[key] = Tokens(in_child, text)
    tokens: Tokens = text.known[key]
    return tokens


class _Piece(NamedTuple):
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]  # of each token in `text`
    pieces: int = 1  # of `_cut`, that it consists of


def _joined(tokenizer: Tokenizer, text: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """The ids of a text in parts, int32, each with its number of characters."""
    pieces = _encoded(tokenizer, _cut(text))
    left = next(pieces)
    begin = 0  # the first token of `left` that is still to be told
    for right in pieces:
        while (seam := _seam(left, right)) is None:
            more = [right, *islice(pieces, left.pieces - 1)]  # as long again, so that an endless word costs twice
            whole = left.text + "".join(piece.text[OVERLAP:] for piece in more)
            place = left.offsets[begin][0] if begin else 0
            left = next(_encode(tokenizer, [whole]))._replace(pieces=left.pieces + len(more))
            begin = next((n for n, (start, _) in enumerate(left.offsets) if start >= place), 0) if place else 0
            if (following := next(pieces, None)) is None:
                break
            right = following
        else:
            yield _told(left, begin, seam[0])
            left, begin = right, seam[1]
    yield _told(left, begin, len(left.ids))


def _told(piece: _Piece, begin: int, end: int) -> tuple[np.ndarray, int]:
    until = len(piece.text) if end == len(piece.ids) else piece.offsets[end][0]
    since = piece.offsets[begin][0] if begin else 0
    return np.array(piece.ids[begin:end], np.int32), until - since


def _cut(text: Iterable[str]) -> Iterator[str]:
    """Pieces of `PIECE + OVERLAP` characters, each beginning `PIECE` after the one before; the last has what is left,
    more than the overlap if it is not the only one."""
    length = PIECE + OVERLAP
    rest, waiting, size = "", [], 0
    for part in text:
        waiting.append(part)
        size += len(part)
        if size <= length:
            continue
        rest, start = "".join(waiting), 0
        while len(rest) - start > length:
            yield rest[start : start + length]
            start += PIECE
        waiting, size = [rest[start:]], len(rest) - start
    yield "".join(waiting)


def _encoded(tokenizer: Tokenizer, pieces: Iterator[str]) -> Iterator[_Piece]:
    """Ever more at once: who needs but a few tokens does not wait for many."""
    at_once = 1
    while batch := list(islice(pieces, at_once)):
        yield from _encode(tokenizer, batch)
        at_once = min(2 * at_once, _AT_ONCE)


def _encode(tokenizer: Tokenizer, pieces: list[str]) -> Iterator[_Piece]:
    made = tokenizer.encode_batch(pieces, add_special_tokens=False)
    return (_Piece(piece, one.ids, one.offsets) for piece, one in zip(pieces, made, strict=True))


def _seam(left: _Piece, right: _Piece) -> tuple[int, int] | None:
    """The same token in two pieces, before which they are joined: as far from their ends as possible."""
    shift = len(left.text) - OVERLAP  # where `right` begins in `left`
    places = {}
    for index in range(len(left.ids) - AGREEING, 0, -1):
        start = left.offsets[index][0] - shift
        if start < 0:
            break
        if start >= left.offsets[index - 1][1] - shift:  # else it begins within a character
            places[start] = index
    shared = bisect_left(right.offsets, (OVERLAP,))  # tokens of `right` that begin in `left`
    head = range(AGREEING, min(shared, len(right.ids) - AGREEING))
    for there in sorted(head, key=lambda index: abs(right.offsets[index][0] - OVERLAP // 2)):
        here = places.get(right.offsets[there][0])
        if here is not None and _around(left, here, shift) == _around(right, there, 0):
            return here, there
    return None


def _around(piece: _Piece, index: int, shift: int) -> list[tuple[int, int, int]]:
    """The tokens on both sides of a place, with where they begin and end."""
    near = slice(index - AGREEING, index + AGREEING)
    return [(id, a - shift, b - shift) for id, (a, b) in zip(piece.ids[near], piece.offsets[near], strict=True)]


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

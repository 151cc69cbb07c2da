"""A tokenizer.json made from what a GGUF or a SentencePiece model says of its vocabulary.

Both name the tokens, their kinds and either the merges (byte-level BPE) or scores (SentencePiece's BPE). What they do
not name, they do not have: no token is added and none is assumed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# llama.cpp's names for the ways in which byte-level tokenizers cut text before BPE. A GGUF carries only the name; the
# regex behind it is compiled into llama.cpp. Those listed here were compared with the ones in libllama 0.5, and their
# tokens id for id, in both directions: from a tokenizer.json to the name (tests/formats/plain/test_vocabulary.py) and
# back (tests/models/tokenizer/test_gguf_tokenizer.py).
DIGIT = r"\p{N}"
"""`Digits(individual_digits)` cuts a text by this pattern."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""`ByteLevel(use_regex)` cuts a text by this pattern."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _OTHER = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_SPACE}"


@dataclass(frozen=True)
class PreTokenizer:
    """What one of llama.cpp's names means.

    patterns      -- regexes, each of which cuts what the one before it left
    ignore_merges -- whether a word that is a token is taken as it is, whatever the merges make of it
    adds_bos      -- whether BOS is put before a text where the file does not say
    same          -- other names for the same
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    same: tuple[str, ...] = ()


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((GPT2,), same=("phi-2", "mellum", "exaone4", "gigachat", "a.x-4.0")),
    "smollm": PreTokenizer((DIGIT, GPT2), same=("starcoder", "refact", "command-r", "codeshell", "exaone")),
    "llama-bpe": PreTokenizer((_LLAMA3,), True, True, same=("llama3", "llama-v3", "falcon3", "pixtral", "lfm2")),
    "dbrx": PreTokenizer((_LLAMA3,), same=("smaug-bpe",)),
    "qwen2": PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}[\r\n]*|{_SPACE}",), same=("deepseek-r1-qwen", "kormo", "megrez")
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
        )
    ),
    "tekken": PreTokenizer((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_OTHER}[\r\n/]*|{_SPACE}",), True, True),
    "gpt-4o": PreTokenizer(
        (rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACE}",),
        same=("llama4", "kanana2"),
    ),
}
"""Each pre-tokenizer stands under the first of its names."""


def named(name: Any) -> PreTokenizer | None:
    """The pre-tokenizer of one of llama.cpp's names, or None where it is not in the table."""
    return next((rule for first, rule in PRE_TOKENIZERS.items() if name == first or name in rule.same), None)


def as_json(rule: PreTokenizer) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json that cuts so."""
    steps: list[dict[str, Any]] = []
    for pattern in rule.patterns:
        if pattern == DIGIT:
            steps.append({"type": "Digits", "individual_digits": True})
        elif pattern != GPT2:
            cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            steps.append(cut)
    bytes_as_characters = {"add_prefix_space": False, "trim_offsets": True, "use_regex": GPT2 in rule.patterns}
    steps.append({"type": "ByteLevel", **bytes_as_characters})
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of tokens have the numbers that SentencePiece and llama.cpp give them."""

_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # found in the text itself, before it is cut
_MARK = "▁"  # stands for a space


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    tokens, kinds    -- by id; an empty text is no token, an UNUSED one only where it is special or a merge needs it
    special          -- the token named as "bos", "eos", "unk", "pad", where there is one
    add_bos, add_eos -- whether these are put around a text
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    special: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are looked for in the text as they stand; they are special unless a user defined them."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": id, "content": token, **plain, "special": kind != USER_DEFINED}
            for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if token and kind in _ADDED
        ]

    def ids(self, needed: frozenset[str] = frozenset()) -> dict[str, int]:
        """token -> id, without those that stand for no text unless they are special or `needed`."""
        kept = needed.union(self.special.values())
        pairs = zip(self.tokens, self.kinds, strict=True)
        used = ((id, token) for id, (token, kind) in enumerate(pairs) if kind != UNUSED or token in kept)
        return {token: id for id, token in used if token}


def byte_level(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], rule: PreTokenizer) -> str:
    """Byte-level BPE: `merges` in the order of their rank, text cut by `rule`."""
    needed = frozenset(token for left, right in merges for token in (left, right, left + right))
    model = {"ignore_merges": rule.ignore_merges, "vocab": vocabulary.ids(needed), "merges": merges}
    parts = {
        "normalizer": None,
        "pre_tokenizer": as_json(rule),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return _written(vocabulary, parts, model)


def sentencepiece(vocabulary: Vocabulary, scores: Sequence[float], *, prefix: bool, squeeze: bool = False) -> str:
    """SentencePiece's BPE, which merges the two neighbours that make the token of the highest score.

    prefix  -- put a space before a text; also before what follows a special token inside one, as llama.cpp does
    squeeze -- drop spaces at the ends of a text and all but one of several
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    squeezed = [
        {"type": "Replace", "pattern": {"Regex": p}, "content": c} for p, c in ((r"\A +| +\z", ""), (" +", " "))
    ]
    prefixed = [{"type": "Prepend", "prepend": _MARK}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*(squeezed if squeeze else []), *prefixed, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*decoders, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
        },
    }
    model = {
        "unk_token": vocabulary.special.get("unk"),
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.kinds,
        "vocab": vocabulary.ids(),
        "merges": list(_merges(vocabulary, scores)),
    }
    return _written(vocabulary, parts, model)


_MOST_CUT = 1 << 29
"""Characters that are copied while tokens are cut at every place; Gemma's 262,144 tokens need some millions."""


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that together are a token, the one of the highest score first.

    Raises `ValueError` for tokens so long that cutting them at every place would take all time."""
    pieces = {t: s for t, k, s in zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True) if k == NORMAL}
    if sum(len(token) ** 2 for token in pieces) > _MOST_CUT:
        raise ValueError(f"its longest token has {max(map(len, pieces)):,} characters; expected some hundreds at most")
    for token in sorted(pieces, key=pieces.__getitem__, reverse=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                yield left, right


def _written(vocabulary: Vocabulary, parts: dict[str, Any], model: dict[str, Any]) -> str:
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        **parts,
        "post_processor": _post_processor(vocabulary),
        "model": {"type": "BPE", **model},
    }
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any]:
    """What puts BOS and EOS around a text, where they are named; nothing else says that there are none."""
    asked = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    token = {kind: vocabulary.special[kind] for kind, add in asked.items() if add and kind in vocabulary.special}

    def around(*texts: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, text in enumerate(texts):
            pieces += [{"SpecialToken": {"id": token["bos"], "type_id": type_id}}] if "bos" in token else []
            pieces.append({"Sequence": {"id": text, "type_id": type_id}})
            pieces += [{"SpecialToken": {"id": token["eos"], "type_id": type_id}}] if "eos" in token else []
        return pieces

    ids = {text: {"id": text, "ids": [vocabulary.tokens.index(text)], "tokens": [text]} for text in token.values()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": ids}

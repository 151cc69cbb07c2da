"""llama.cpp's names for the ways in which byte-level tokenizers cut text before BPE.

A GGUF carries only the name; the regex behind it is compiled into llama.cpp. Those listed here were compared with the
ones in libllama 0.5, and their tokens id for id, in both directions: from a tokenizer.json to the name
(tests/formats/plain/test_vocabulary.py) and back (tests/models/tokenizer/test_gguf_tokenizer.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

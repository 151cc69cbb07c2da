"""llama.cpp's names for pre-tokenizers, recognised by what a tokenizer.json says about cutting text before BPE.

A GGUF carries only the name; the regex behind it is compiled into llama.cpp. The table lists those whose regexes were
compared with the ones in libllama 0.5 and whose tokens were compared id for id
(tests/artifacts/llama_cpp/test_vocabulary.py).
"""

from collections.abc import Iterator

from sparsepack.errors import PackingError

ZIGZAG = "pack as zigzag-q4_k, which embeds the tokenizer itself"

INEXACT = dict.fromkeys(
    ("tekken", "gpt-4o"),
    "llama.cpp takes every letter beyond a-z and A-Z for upper and lower case both, and no combining mark for a "
    "letter: words with such marks, or with such letters and a capital inside, can be tokenised differently",
)
"""Names whose regex in llama.cpp only approximates the tokenizer's -> what differs (worth a line on stderr)."""

_DIGIT = r"\p{N}"  # Digits(individual_digits)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel(use_regex)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _OTHER = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

# The regexes that cut text before BPE -> (llama.cpp's name, whether that name ignores merges for whole words).
_NAMES: dict[tuple[str, ...], tuple[tuple[str, bool], ...]] = {
    (_GPT2,): (("gpt-2", False),),
    (_DIGIT, _GPT2): (("smollm", False),),
    (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_SPACE}",): (("llama-bpe", True), ("dbrx", False)),
    (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}[\r\n]*|{_SPACE}",): (("qwen2", False),),
    (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
    ): (("qwen35", False),),
    (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_OTHER}[\r\n/]*|{_SPACE}",): (("tekken", True),),
    (rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACE}",): (
        ("gpt-4o", False),
    ),
}


def pretokenizer_names(pre_tokenizer: dict | None) -> tuple[tuple[str, bool], ...]:
    """llama.cpp's names for a byte-level pre-tokenizer, each with whether it takes whole words that are tokens as they
    are (`ignore_merges`).

    Raises `PackingError` where llama.cpp has none.
    """
    patterns = tuple(_patterns(pre_tokenizer))
    if patterns not in _NAMES:
        raise PackingError(
            f"tokenizer.json: the pre_tokenizer cuts text by {' then '.join(map(repr, patterns)) or 'nothing'}: "
            f"llama.cpp has no name for it; {ZIGZAG}"
        )
    return _NAMES[patterns]


def steps(definition: dict | None, inner: str) -> Iterator[dict]:
    """The steps of a normalizer, pre-tokenizer or post-processor; a Sequence, with them in `inner`, taken apart."""
    if definition and definition["type"] == "Sequence":
        for step in definition[inner]:
            yield from steps(step, inner)
    elif definition:
        yield definition


def refused(part: str, definition: dict | None) -> PackingError:
    """The error for a normalizer or pre-tokenizer that no key of llama.cpp's expresses."""
    return PackingError(f"tokenizer.json: llama.cpp has no equivalent of the {part} {definition}; {ZIGZAG}")


def _patterns(pre_tokenizer: dict | None) -> Iterator[str]:
    """The regexes by which a byte-level pre-tokenizer cuts, in order."""
    cuts = list(steps(pre_tokenizer, "pretokenizers"))
    if not cuts or cuts[-1]["type"] != "ByteLevel":
        raise refused("pre_tokenizer", pre_tokenizer)
    for step in cuts:
        # (Removed, inverted) keeps the matches and is the same as (Isolated, not inverted): each regex covers all text.
        how = step.get("behavior"), step.get("invert", False)
        if step["type"] == "Split" and how in (("Isolated", False), ("Removed", True)) and "Regex" in step["pattern"]:
            yield step["pattern"]["Regex"]
        elif step["type"] == "Digits" and step["individual_digits"]:
            yield _DIGIT
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True):
                yield _GPT2
        else:
            raise refused("pre_tokenizer", step)

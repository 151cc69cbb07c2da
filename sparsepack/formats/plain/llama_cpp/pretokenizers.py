"""llama.cpp's names for pre-tokenizers, recognised by what a tokenizer.json says about cutting text before BPE.

`models/tokenizer/pretokenizers.py` has the table of names.
"""

from collections.abc import Iterator

from sparsepack.errors import PackingError
from sparsepack.models.tokenizer.pretokenizers import DIGIT, GPT2, PRE_TOKENIZERS

ZIGZAG = "pack as zigzag-q4_k, which embeds the tokenizer itself"

INEXACT = dict.fromkeys(
    ("tekken", "gpt-4o"),
    "llama.cpp takes every letter beyond a-z and A-Z for upper and lower case both, and no combining mark for a "
    "letter: words with such marks, or with such letters and a capital inside, can be tokenised differently",
)
"""llama.cpp's regex of these names only approximates the tokenizer's; the value says what differs, worth a line on
stderr."""


def pretokenizer_names(pre_tokenizer: dict | None) -> tuple[tuple[str, bool], ...]:
    """llama.cpp's names for a byte-level pre-tokenizer, each with whether it takes whole words that are tokens as they
    are (`ignore_merges`).

    Raises `PackingError` where llama.cpp has none.
    """
    patterns = tuple(_patterns(pre_tokenizer))
    names = tuple((name, rule.ignore_merges) for name, rule in PRE_TOKENIZERS.items() if rule.patterns == patterns)
    if not names:
        raise PackingError(
            f"tokenizer.json: the pre_tokenizer cuts text by {' then '.join(map(repr, patterns)) or 'nothing'}: "
            f"llama.cpp has no name for it; {ZIGZAG}"
        )
    return names


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
            yield DIGIT
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True):
                yield GPT2
        else:
            raise refused("pre_tokenizer", step)

"""Tokenizers that end the process are refused here, before the library `tokenizers` reads them."""

import json
from pathlib import Path
from typing import Any

from sparsepack.models.tokenizer.sandbox import SandboxError, load_tokenizer

_MOST_ADDED = 1000
"""Tokens around a text that a post-processor may add; those of known models add one or two."""


def check_tokenizer(tokenizer_json: str) -> dict[str, Any]:
    """Return what a tokenizer.json says. Raises `ValueError` for one that would abort the process, by its merges or by
    the tokens that it puts around a text, or is no JSON.

    Of a merge's second part the library (0.23) cuts off as many bytes as `continuing_subword_prefix` has, without
    looking what they are. Where that leaves half a character, telling of it ends in an abort that nobody can catch.
    """
    try:
        read: Any = json.loads(tokenizer_json)
        model: Any = read.get("model") or {}
        prefix, merges = model.get("continuing_subword_prefix") or "", model.get("merges") or ()
        seconds = (merge.partition(" ")[2] if isinstance(merge, str) else merge[1] for merge in merges if prefix)
        wrong = next((second for second in seconds if not second.startswith(prefix)), None)
        added = _added_ids(read.get("post_processor"))
    except (AttributeError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"it is no tokenizer ({error})") from error
    if wrong is not None:
        raise ValueError(f"a merge with {wrong[:60]!r}, which does not begin with its continuing_subword_prefix")
    if added > _MOST_ADDED:
        raise ValueError(f"its post_processor adds {added:,} tokens to a text; expected at most {_MOST_ADDED:,}")
    return dict(read)


def _added_ids(part: Any) -> int:
    """Return how many ids a post-processor puts around a text, or a pair of them, at most."""
    if not isinstance(part, dict):
        return 0
    added = sum(_added_ids(each) for each in part.get("processors") or ())
    sizes = {name: len(token["ids"]) for name, token in (part.get("special_tokens") or {}).items()}
    for template in (part.get("single"), part.get("pair")):
        pieces = template if isinstance(template, list) else ()
        added += sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)
    return added


def check_tokenizer_of(folder: Path) -> None:
    """Check the tokenizer.json of a folder, if there is one, as `check_tokenizer` does."""
    path = folder / "tokenizer.json"
    if path.is_file():
        check_in_child(path.read_text(encoding="utf-8"))


def check_in_child(tokenizer_json: str) -> None:
    """Raise `ValueError` as `check_tokenizer`, and for a tokenizer.json that takes too long or too much memory to read:
    else it can be read in this process."""
    check_tokenizer(tokenizer_json)
    try:
        load_tokenizer(tokenizer_json)
    except SandboxError as error:
        raise ValueError(f"it cannot be read ({error})") from error

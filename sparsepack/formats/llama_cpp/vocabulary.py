"""A Hugging Face tokenizer as the GGUF keys from which stock llama.cpp tokenises text in the same way.

llama.cpp has two tokenizers that fit decoder models. `gpt2` is byte-level BPE: tokens, merges and the *name* of a
pre-tokenizer, whose regex is compiled in. `llama` is SentencePiece-style BPE: tokens with scores, the neighbours whose
joint text scores highest merge first, and `<0xNN>` tokens stand for characters that are no token. Whatever is neither
is refused. What llama.cpp does differently all the same, with no key to change it:

- NFC normalisation (Qwen) is not applied: text that is not in NFC is tokenised as it stands.
- `llama` puts the space prefix before every piece of text that follows a special token and before text that begins
  with a space, as SentencePiece does; `Metaspace` with `prepend_scheme: first` does neither.
- `tekken` and `gpt-4o` cut some words elsewhere: see `INEXACT`.
- `lstrip` and `rstrip` of special tokens (Phi-3) are ignored.

llama.cpp's names for pre-tokenizers, recognised by what a tokenizer.json says about cutting text before BPE.

`models/tokenizer/tokenizer_json.py` has the table of names.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from gguf import GGUFValueType, TokenType

from sparsepack.errors import PackingError
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE, DEFAULT, TOOL_USE, templates_of
from sparsepack.models.tokenizer.tokenizer_json import DIGIT, GPT2, PRE_TOKENIZERS

_KEY = "tokenizer.ggml."

KEY_TYPES: dict[str, tuple[GGUFValueType, GGUFValueType | None]] = {
    _KEY + "model": (GGUFValueType.STRING, None),
    _KEY + "pre": (GGUFValueType.STRING, None),
    _KEY + "tokens": (GGUFValueType.ARRAY, GGUFValueType.STRING),
    _KEY + "token_type": (GGUFValueType.ARRAY, GGUFValueType.INT32),
    _KEY + "scores": (GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
    _KEY + "merges": (GGUFValueType.ARRAY, GGUFValueType.STRING),
    _KEY + "bos_token_id": (GGUFValueType.UINT32, None),
    _KEY + "eos_token_id": (GGUFValueType.UINT32, None),
    _KEY + "eot_token_id": (GGUFValueType.UINT32, None),
    _KEY + "unknown_token_id": (GGUFValueType.UINT32, None),
    _KEY + "padding_token_id": (GGUFValueType.UINT32, None),
    _KEY + "add_bos_token": (GGUFValueType.BOOL, None),
    _KEY + "add_eos_token": (GGUFValueType.BOOL, None),
    _KEY + "add_space_prefix": (GGUFValueType.BOOL, None),
    CHAT_TEMPLATE: (GGUFValueType.STRING, None),
    f"{CHAT_TEMPLATE}.{TOOL_USE}": (GGUFValueType.STRING, None),
}
"""The type and element type of every key: `writer.add_key_value(key, value, *KEY_TYPES[key])`."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

Ranks = dict[tuple[str, str], int]


def vocabulary(tokenizer: dict, tokenizer_config: dict, config: dict, turn_ends: Sequence[int] = ()) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF, as plain Python values; `KEY_TYPES` has their GGUF types.

    `tokenizer`, `tokenizer_config` and `config` are the parsed tokenizer.json, tokenizer_config.json (with the text of
    a chat_template.jinja put in as `chat_template`, where the model has that file) and config.json.

    There are `config["vocab_size"]` tokens; ids that the tokenizer does not use become UNUSED tokens named `[PADn]`,
    special tokens beyond them are left out. `turn_ends` are all the tokens that end a turn, the one to be named as
    llama.cpp's EOT first.
    Whether BOS and EOS are added is what the post-processor of tokenizer.json does: transformers 5 reads nothing else
    (`add_bos_token` of tokenizer_config.json counts only where there is no tokenizer.json).

    Raises `PackingError` where the tokenizer has more tokens than the model or llama.cpp would cut text otherwise.
    """
    model = tokenizer["model"]
    affixed = any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type", "BPE") != "BPE" or affixed:
        raise PackingError(
            f"tokenizer.json: the model is {'BPE with subword affixes' if affixed else model['type']}; "
            f"expected byte-level or SentencePiece-style BPE, which llama.cpp reproduces; {ZIGZAG}"
        )
    tokens, types = _tokens(tokenizer, config)
    ids = {token: i for i, token in enumerate(tokens)}
    special = {kind: _special_id(kind, ids, tokenizer_config, config) for kind in ("bos", "eos", "pad", "unk")}
    special["unk"] = ids.get(model.get("unk_token"), special["unk"])
    before, after = _added_ids(tokenizer.get("post_processor"))
    special["bos"] = special["bos"] if before is None else before
    if special["eos"] is None or after not in (None, special["eos"]):
        # Without the key llama.cpp would take token 11 (gpt2) or 2 (llama) for the end of text.
        problem = "no end-of-text token is named" if after is None else f"token {after} is appended, which is not EOS"
        raise PackingError(f"tokenizer.json: {problem}; name it in config.json as eos_token_id or {ZIGZAG}")

    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    keys: dict[str, Any]
    if model.get("byte_fallback"):
        if special["unk"] is not None and special["unk"] not in (special["bos"], special["eos"]):
            types[special["unk"]] = TokenType.UNKNOWN
        keys = _sentencepiece(tokenizer, tokens, types, ranks)
    else:
        keys = _byte_level(tokenizer, tokens, types, ranks)
    keys |= {"tokens": tokens, "token_type": [int(kind) for kind in types]}
    keys |= {"add_bos_token": before is not None, "add_eos_token": after is not None}
    special["eot"] = next((end for end in turn_ends if end != special["eos"] and end < len(tokens)), None)
    names = {"unk": "unknown", "pad": "padding"}
    keys |= {f"{names.get(kind, kind)}_token_id": i for kind, i in special.items() if i is not None}
    named = {_KEY + key: value for key, value in keys.items()}
    templates = templates_of(tokenizer_config)
    keys_of = {DEFAULT: CHAT_TEMPLATE, TOOL_USE: f"{CHAT_TEMPLATE}.{TOOL_USE}"}
    return named | {key: templates[name] for name, key in keys_of.items() if name in templates}


def _tokens(tokenizer: dict, config: dict) -> tuple[list[str], list[TokenType]]:
    size = config.get("vocab_size")
    if not isinstance(size, int):
        raise PackingError("config.json: no vocab_size; expected the number of rows of the embedding; add it")
    by_id = {i: (token, TokenType.NORMAL) for token, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer.get("added_tokens") or []:
        if not added["special"] and (added.get("single_word") or added.get("lstrip") or added.get("rstrip")):
            raise PackingError(
                f"tokenizer.json: the added token {added['content']!r} asks for single_word, lstrip or rstrip, "
                f"which llama.cpp ignores; expected an added token without; {ZIGZAG}"
            )
        if added["special"] and added["id"] >= size:
            by_id.pop(added["id"], None)
            continue  # llama.cpp has no more tokens than rows of the embedding
        by_id[added["id"]] = added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if max(by_id, default=-1) >= size:
        raise PackingError(
            f"tokenizer.json: token {max(by_id)} ({by_id[max(by_id)][0]!r}), but vocab_size in config.json is {size}; "
            "expected no more tokens than the model has embeddings; enlarge them with resize_token_embeddings"
        )
    taken = {token for token, _ in by_id.values()}
    listed = [by_id.get(i) or (_unused_name(i, taken), TokenType.UNUSED) for i in range(size)]
    return [token for token, _ in listed], [kind for _, kind in listed]


def _unused_name(i: int, taken: set[str]) -> str:
    name = f"[PAD{i}]"
    while name in taken:
        name = f"[{name}]"
    taken.add(name)
    return name


def _special_id(kind: str, ids: dict[str, int], tokenizer_config: dict, config: dict) -> int | None:
    token = tokenizer_config.get(f"{kind}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token in ids:
        return ids[token]
    value = config.get(f"{kind}_token_id")
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and 0 <= value < len(ids) else None


def _added_ids(post_processor: dict | None) -> tuple[int | None, int | None]:
    """The ids that the post-processor puts before and after a single text."""
    added: tuple[list[int], list[int]] = [], []
    for step in steps(post_processor, "processors"):
        if step["type"] == "ByteLevel":  # moves offsets only
            continue
        if step["type"] != "TemplateProcessing":
            raise PackingError(
                f"tokenizer.json: the post_processor {step['type']} is none that llama.cpp knows; "
                f"expected TemplateProcessing; {ZIGZAG}"
            )
        side = 0
        for piece in step["single"]:
            if "Sequence" in piece:
                side = 1
            else:
                added[side].extend(step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if max(map(len, added)) > 1:
        raise PackingError(
            f"tokenizer.json: the post_processor puts {added[0]} before and {added[1]} after the text; "
            f"llama.cpp adds at most one token on each side; {ZIGZAG}"
        )
    before, after = added
    return (before[0] if before else None), (after[0] if after else None)


def _byte_level(tokenizer: dict, tokens: list[str], types: list[TokenType], ranks: Ranks) -> dict[str, Any]:
    for step in steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] != "NFC":
            raise refused("normalizer", step)
    if tokenizer["model"].get("unk_token") and sum(len(token) == 1 for token in tokens) < 256:
        raise PackingError(
            f"tokenizer.json: some of the 256 bytes are no token and become {tokenizer['model']['unk_token']!r}; "
            f"expected all bytes, llama.cpp drops the others; {ZIGZAG}"
        )
    flags = tokenizer["model"].get("ignore_merges", False)
    names = pretokenizer_names(tokenizer.get("pre_tokenizer"))
    name, ignores = next((pair for pair in names if pair[1] == flags), names[0])
    if ignores != flags:  # no matter, as long as every token is also what its merges make
        for token, kind in zip(tokens, types, strict=True):
            if kind == TokenType.NORMAL and len(_merged(token, ranks)[0]) > 1:
                raise PackingError(
                    f"tokenizer.json: ignore_merges is {flags}, llama.cpp's {name} does the opposite, "
                    f"and the merges do not make the token {token!r}; {ZIGZAG}"
                )
    merges = [" ".join(pair) for pair in sorted(ranks, key=ranks.__getitem__)]
    return {"model": "gpt2", "pre": name, "merges": merges, "add_space_prefix": False}


def _sentencepiece(tokenizer: dict, tokens: list[str], types: list[TokenType], ranks: Ranks) -> dict[str, Any]:
    missing = {f"<0x{byte:02X}>" for byte in range(256)} - set(tokens)
    if missing:
        raise PackingError(
            f"tokenizer.json: byte_fallback without the byte token {min(missing)}; "
            f"expected all 256, without them llama.cpp stops on unknown characters; {ZIGZAG}"
        )
    prefix, splits = _spaces(tokenizer)
    scores = [-float(len(ranks))] * len(tokens)
    for i, token in enumerate(tokens):
        if types[i] == TokenType.NORMAL and _BYTE_TOKEN.fullmatch(token):
            types[i] = TokenType.BYTE
        if types[i] != TokenType.NORMAL or len(token) == 1:
            continue
        parts, rank = _merged(token, ranks)
        # llama.cpp merges any two neighbours that together are a token, so two parts would not stay two.
        if len(parts) == 2 or (splits and "▁" in token[1:]):
            raise PackingError(
                f"tokenizer.json: nothing makes the token {token!r}, but llama.cpp would make it of its parts; {ZIGZAG}"
            )
        scores[i] = -float(rank if len(parts) == 1 else len(ranks))
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}


def _spaces(tokenizer: dict) -> tuple[bool, bool]:
    """(whether a space is put before the text, whether text is cut before each space); spaces must become ▁."""
    prefix = splits = marked = False
    for step in steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            prefix = True
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, "▁"):
            marked = True
        else:
            raise refused("normalizer", step)
    for step in steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if marked and step["type"] == "Split" and step["pattern"] == {"String": " "}:
            continue  # Gemma's: where every space is marked there is none to cut at
        if step["type"] != "Metaspace" or step["replacement"] != "▁":
            raise refused("pre_tokenizer", step)
        scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
        marked, prefix, splits = True, prefix or scheme != "never", step.get("split", True)
    if not marked:
        raise PackingError(f"tokenizer.json: spaces stay spaces; expected ▁ for them, as llama.cpp writes; {ZIGZAG}")
    return prefix, splits


def _merged(token: str, ranks: Ranks) -> tuple[list[str], int]:
    """BPE of one token's own text: the parts that remain, and the rank of the last merge (-1: none).

    Of all the merges that could make a token, the last one here is the only one that ever does: inside a text the same
    merges happen in the same order until one reaches across the token's ends. Its rank orders llama.cpp's merging.
    """
    parts, rank = list(token), -1
    while len(parts) > 1:
        best, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
        if best == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        rank = best
    return parts, rank


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


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

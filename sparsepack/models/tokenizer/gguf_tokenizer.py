"""The tokenizer of a model that is a GGUF, built from the file's own keys.

transformers' reader of GGUF tokenizers adds tokens that the vocabulary does not have, and takes a pre-tokenizer that it
does not know for GPT-2's. Here the file is taken at its word: the tokens are llama.cpp's, id for id, and what is not
understood is refused. A file of ours carries the model's tokenizer.json, which is the tokenizer then. Of others'
files, where llama.cpp itself differs from the model's tokenizer.json (NFC, SentencePiece's prefix space after special
tokens), the tokens are llama.cpp's.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import shown
from sparsepack.models.tokenizer.chat import (
    SPECIAL_TOKENS,
    gguf_templates,
    read_special_tokens,
    template_setting,
)
from sparsepack.models.tokenizer.tokenizer_json import (
    NORMAL,
    PRE_TOKENIZERS,
    PreTokenizer,
    Vocabulary,
    byte_level,
    named,
    sentencepiece,
)

OWN_TOKENIZER = "sparsepack.tokenizer"
"""The tokenizer.json that sparsepack puts into the GGUFs it writes."""

_KEY = "tokenizer.ggml."
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_INSTEAD = "expected the model's Hugging Face folder here"


def gguf_tokenizer_json(file: GgufFile, name: str) -> str:
    """The content of a tokenizer.json with which a text has the tokens that it has in llama.cpp.

    Raises `CheckpointError` where the file has no vocabulary, one that is not understood, or more tokens than rows in
    its embedding.
    """
    keys = _Keys(file.metadata, name)
    tokens = keys.list("tokens", str)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{name}: the tensor token_embd.weight is missing; make the file again")
    rows = file.tensors["token_embd.weight"].shape[0]
    if len(tokens) > rows:
        raise CheckpointError(
            f"{name}: the tokenizer has {len(tokens)} tokens, the model {rows}; they do not belong together"
        )
    if OWN_TOKENIZER in file.metadata:
        return keys.text(OWN_TOKENIZER)
    kind = keys.text(f"{_KEY}model")
    if kind == "llama":
        vocabulary = _vocabulary(keys, tokens, adds_bos=True)
        try:
            return sentencepiece(vocabulary, _scores(keys, tokens), prefix=keys.flag("add_space_prefix", True))
        except ValueError as error:
            raise keys.refused(str(error)) from error
    if kind != "gpt2":
        raise keys.refused(f"{_KEY}model {kind[:40]!r} is neither gpt2 nor llama")
    rule = _rule(keys)
    vocabulary = _vocabulary(keys, tokens, rule.adds_bos)
    return byte_level(vocabulary, _merges(keys, vocabulary), rule)


def gguf_tokenizer_config(file: GgufFile, name: str) -> dict[str, Any]:
    """What a tokenizer_config.json would say: the texts of the special tokens that the file names, and its
    templates."""
    keys = _Keys(file.metadata, name)
    config: dict[str, Any] = {f"{kind}_token": text for kind, text in _special(keys, keys.list("tokens", str)).items()}
    try:
        if OWN_TOKENIZER in file.metadata and SPECIAL_TOKENS in file.metadata:
            config |= read_special_tokens(keys.text(SPECIAL_TOKENS))
        if setting := template_setting(gguf_templates(file.metadata)):
            config["chat_template"] = setting
    except (ValueError, RecursionError) as error:
        raise keys.refused(f"its special tokens or chat templates are not understood ({shown(error)})") from error
    return config


def gguf_turn_ends(file: GgufFile) -> list[int]:
    """The ids of the tokens that llama.cpp ends a turn or a message at, beside EOS."""
    ids = [file.metadata.get(f"{_KEY}{kind}_token_id") for kind in ("eot", "eom")]
    return [id for id in ids if type(id) is int]


class _Keys:
    """The keys of a file, each refused where it is of another type than expected."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata, self.name = metadata, name

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {what}; {_INSTEAD}")

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self.refused(f"{key} is {'missing' if value is None else 'no text'}")
        return value

    def list(self, key: str, kind: type) -> list[Any]:
        value = self.metadata.get(_KEY + key)
        if not isinstance(value, list):
            raise self.refused(f"{_KEY}{key} is {'missing' if value is None else 'no list'}")
        wrong = next((item for item in value if type(item) is not kind), None)
        if wrong is not None:
            raise self.refused(f"{_KEY}{key} holds {str(wrong)[:40]!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise self.refused(f"{_KEY}{key} is {str(value)[:40]!r}, neither true nor false")
        return value


def _rule(keys: _Keys) -> PreTokenizer:
    pre = keys.metadata.get(f"{_KEY}pre")
    rule = named(pre)
    if rule is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise keys.refused(f"{_KEY}pre {str(pre)[:40]!r} is none of {known}, so how it cuts text is not known")
    return rule


def _vocabulary(keys: _Keys, tokens: list[str], adds_bos: bool) -> Vocabulary:
    kinds = keys.list("token_type", int) if f"{_KEY}token_type" in keys.metadata else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise keys.refused(f"{len(tokens)} tokens, but {len(kinds)} in {_KEY}token_type")
    twice = next((token for token, count in Counter(tokens).items() if token and count > 1), None)
    if twice is not None:
        raise keys.refused(f"the token {twice[:40]!r} stands twice in {_KEY}tokens")
    adds = {"add_bos": keys.flag("add_bos_token", adds_bos), "add_eos": keys.flag("add_eos_token", False)}
    return Vocabulary(tokens, kinds, _special(keys, tokens), **adds)


def _special(keys: _Keys, tokens: list[str]) -> dict[str, str]:
    special = {}
    for kind, word in _SPECIAL.items():
        key = f"{_KEY}{word}_token_id"
        id = keys.metadata.get(key)
        if id is None:
            continue
        if type(id) is not int or not 0 <= id < len(tokens):
            raise keys.refused(f"{key} is {str(id)[:40]}, there are {len(tokens)} tokens")
        if tokens[id]:
            special[kind] = tokens[id]
    return special


def _scores(keys: _Keys, tokens: list[str]) -> list[float]:
    scores = keys.list("scores", float)
    if len(scores) != len(tokens):
        raise keys.refused(f"{len(tokens)} tokens, but {len(scores)} in {_KEY}scores")
    return scores


def _merges(keys: _Keys, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    listed = keys.list("merges", str) if f"{_KEY}merges" in keys.metadata else []  # gguf-py writes no empty list
    words = (token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == NORMAL)
    if not listed and (word := next((word for word in words if len(word) > 1), None)):
        raise keys.refused(f"no {_KEY}merges, without which nothing makes the token {word[:40]!r}")
    known = frozenset(vocabulary.tokens)
    pairs = []
    for merge in listed:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= known:
            raise keys.refused(f"the merge {merge[:40]!r} is not of two tokens into a third")
        pairs.append((left, right))
    return pairs

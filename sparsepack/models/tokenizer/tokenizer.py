"""A model's tokenizer as transformers has it, from its folder or GGUF, or from the tokenizer.json of an artifact.

Tokenizers that end the process are refused here, before the library `tokenizers` reads them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.config_files import STOCK_ALONE, refused_own_code, tell_own_code
from sparsepack.models.tokenizer.chat import named_tokens
from sparsepack.models.tokenizer.gguf_tokenizer import gguf_tokenizer_config, gguf_tokenizer_json
from sparsepack.models.tokenizer.sandbox import SandboxError, load_tokenizer
from sparsepack.models.tokenizer.sentencepiece_model import FILE, sentencepiece_config, sentencepiece_json
from sparsepack.models.tokenizer.tokens import backend_of, bos_tokens, check_ids

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


def gguf_tokenizer(file: GgufFile, name: str) -> Any:
    """The tokenizer of a GGUF; raises `CheckpointError` as `gguf_tokenizer_json` does, and where it does not work."""
    tokenizer_json, config = gguf_tokenizer_json(file, name), gguf_tokenizer_config(file, name)
    try:
        check_in_child(tokenizer_json)
        tokenizer = wrapped(tokenizer_json, named_tokens(config), config.get("chat_template"))
        # What does not fit together shows only in use.
        list(tokenizer("a b", add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:  # the libraries raise bare Exception
        raise CheckpointError(f"{name}: its tokenizer cannot be read ({shown(error)}); make the file again") from error
    return tokenizer


def folder_tokenizer(folder: Path, model: Any = None) -> Any:
    """The tokenizer of a Hugging Face folder: transformers' own, except where there is only a `tokenizer.model`.

    model -- the model's stock configuration; None: what config.json in the folder says

    Raises `CheckpointError` as `sentencepiece_json` does and for one that is Python of the model's own, and what
    transformers raises.
    """
    from transformers import AutoTokenizer

    if only_sentencepiece(folder):
        config = sentencepiece_config(folder)
        return wrapped(sentencepiece_json(folder), named_tokens(config), config.get("chat_template"))
    check_tokenizer_of(folder)
    settings = folder / "tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=model, **STOCK_ALONE)
    except ValueError as error:
        raise refused_own_code(error, settings) or error from error
    tell_own_code(settings)
    if getattr(tokenizer, "split_special_tokens", False):
        raise CheckpointError(
            f"{settings}: split_special_tokens is set, by which transformers takes special tokens in a text for words; "
            "here they are tokens always: set it to false"
        )
    return tokenizer


def only_sentencepiece(folder: Path) -> bool:
    """Whether a folder has a `tokenizer.model`, and no tokenizer.json."""
    return (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()


def wrapped(tokenizer_json: str, special_tokens: Mapping[str, Any], chat_template: Any = None) -> Any:
    """The content of a tokenizer.json as a tokenizer of transformers.

    special_tokens -- their texts by the names that transformers has for them, bos_token and the like
    chat_template  -- as tokenizer_config.json has it

    Raises whatever the libraries raise for a damaged one.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    usual = PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_of(Tokenizer.from_str(tokenizer_json)),
        chat_template=chat_template,
        model_specific_special_tokens={n: token for n, token in special_tokens.items() if n not in usual},
        **{name: token for name, token in special_tokens.items() if name in usual},
    )


def carried_json(tokenizer: Any, written: str | None = None) -> str:
    """A tokenizer of transformers as the content of a tokenizer.json, with all that its class and settings add, and
    without truncation and padding.

    written -- the content of the model's own file, which is taken where it means the same
    """
    from tokenizers import Tokenizer

    meant = str(backend_of(tokenizer).to_str())
    if written is not None and backend_of(Tokenizer.from_str(written)).to_str() == meant:
        read = json.loads(written)
        return written if read.get("truncation") is None and read.get("padding") is None else meant
    return meant


def check_fits(tokenizer: Any, vocabulary: int, name: str) -> None:
    """Raise `CheckpointError` where a tokenizer makes tokens that a model of so many does not have.

    Special ones beyond the embedding are taken, as transformers and llama.cpp take them: Gemma 3's text models have no
    row for <image_soft_token>, and some tokenizers were given a [PAD] that the model was not. A text that spells one is
    refused where it is tokenised.
    """
    backend = backend_of(tokenizer)
    added = backend.get_added_tokens_decoder()
    tokens = [id for id in backend.get_vocab().values() if id >= vocabulary and not (id in added and added[id].special)]
    if tokens:
        raise CheckpointError(
            f"{name}: the tokenizer has {max(tokens) + 1} tokens, the model {vocabulary}; they do not belong together"
        )
    check_ids(
        tokenizer,
        bos_tokens(tokenizer),
        vocabulary,
        f"{name}: what its tokenizer puts before every text",
        CheckpointError,
    )

"""A model's tokenizer, from its folder or GGUF: as the text of a tokenizer.json, and as transformers wraps it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import shown
from sparsepack.models.own_code import STOCK_ALONE, refused_own_code, tell_own_code
from sparsepack.models.tokenizer.gguf_tokenizer import gguf_tokenizer_config, gguf_tokenizer_json
from sparsepack.models.tokenizer.sentencepiece_model import FILE, sentencepiece_config, sentencepiece_json
from sparsepack.models.tokenizer.tokenizer_check import check_in_child, check_tokenizer_of

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def gguf_tokenizer(file: GgufFile, name: str) -> Any:
    """The tokenizer of a GGUF; raises `CheckpointError` as `gguf_tokenizer_json` does, and where it does not work."""
    tokenizer_json, config = gguf_tokenizer_json(file, name), gguf_tokenizer_config(file, name)
    try:
        check_in_child(tokenizer_json)
        tokenizer = _wrapped(tokenizer_json, config)
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
        return _wrapped(sentencepiece_json(folder), sentencepiece_config(folder))
    check_tokenizer_of(folder)
    config = folder / "tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=model, **STOCK_ALONE)
    except ValueError as error:
        raise refused_own_code(error, config) or error from error
    tell_own_code(config)
    return tokenizer


def only_sentencepiece(folder: Path) -> bool:
    """Whether a folder has a `tokenizer.model`, and no tokenizer.json."""
    return (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()


def _wrapped(tokenizer_json: str, config: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    kept = {name: config[name] for name in (*_SPECIAL, "chat_template") if config.get(name) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json), **kept)

"""The texts beside a checkpoint's weights, from its folder, or made again where the checkpoint is a GGUF."""

import json
from pathlib import Path
from typing import Any

from sparsepack.errors import PackingError
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.segmented_config import segmented_config, stock_values
from sparsepack.models.text_parts import TEXT_PARTS
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE, template_of
from sparsepack.models.tokenizer.sentencepiece_model import sentencepiece_config
from sparsepack.models.tokenizer.tokenizer import only_sentencepiece

CONFIG = "config.json"


def config_json(checkpoint: Checkpoint) -> str:
    """The content of the config.json that the family's stock model has; of whether the embedding is the output matrix
    it says what the tensors do."""
    path = checkpoint.path / CONFIG
    if not path.is_file():
        return str(checkpoint.config.to_json_string())
    text = path.read_text(encoding="utf-8")
    values = json.loads(text)
    if values.get("model_type") in TEXT_PARTS:
        return str(checkpoint.config.to_json_string())
    stock = stock_values(values)[0]
    tied = stock.get("tie_word_embeddings", type(checkpoint.config)().tie_word_embeddings)
    if tied is not checkpoint.tied:
        stock["tie_word_embeddings"] = checkpoint.tied
    elif not checkpoint.bases:
        return text
    return json.dumps(stock, indent=2, ensure_ascii=False)


_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""transformers reads these, where a folder has them, beside config.json and tokenizer.json."""


def texts_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The files that describe a model, by name: config.json, the tokenizer's, and what else there is. Raises as
    `tokenizer_config`."""
    config = config_json(checkpoint)
    if checkpoint.bases:
        config = segmented_config(config, checkpoint.bases)
    texts = {CONFIG: config, "tokenizer.json": checkpoint.tokenizer_json()}
    if checkpoint.path.is_file() or only_sentencepiece(checkpoint.path):
        of_tokenizer = json.dumps(tokenizer_config(checkpoint), indent=2, ensure_ascii=False)
        return texts | {"tokenizer_config.json": f"{of_tokenizer}\n"}
    beside = [checkpoint.path / name for name in _BESIDE]
    return texts | {path.name: path.read_text(encoding="utf-8") for path in beside if path.is_file()}


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tokenizer_config.json says, with the text of chat_template.jinja as `chat_template`.

    Raises `PackingError` where the file is no JSON object, or its template no text.
    """
    if checkpoint.path.is_file():
        tokenizer = checkpoint.tokenizer
        named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return {**named, "chat_template": tokenizer.chat_template}
    if only_sentencepiece(checkpoint.path):
        return _with_template(sentencepiece_config(checkpoint.path), checkpoint.path)
    path = checkpoint.path / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise PackingError(f"{path}: not JSON ({shown(error)}); download it again") from error
    if not isinstance(config, dict):
        raise PackingError(f"{path}: expected a JSON object; download it again")
    return _with_template(config, checkpoint.path)


def _with_template(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            config = config | {"chat_template": path.read_text(encoding="utf-8")}
        (template_of(config) or "").encode()  # JSON can hold halves of characters
    except ValueError as error:
        raise PackingError(f"{folder}: its chat template is no text ({shown(error)}); download it again") from error
    return config


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The model's chat template, the default one of several; None where it brings none. Raises as
    `tokenizer_config`."""
    if checkpoint.gguf is not None:
        return template_of({"chat_template": checkpoint.gguf.metadata.get(CHAT_TEMPLATE)})
    return template_of(tokenizer_config(checkpoint))

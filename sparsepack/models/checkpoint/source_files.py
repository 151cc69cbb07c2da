"""The texts beside a checkpoint's weights, from its folder, or made again where the checkpoint is a GGUF."""

import json
from typing import Any

from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import segmented_config, stock_values
from sparsepack.models.families import TEXT_PARTS
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE_FILE, DEFAULT, template_setting, templates_of
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
    CHAT_TEMPLATE_FILE,
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
    if checkpoint.path.is_dir() and not only_sentencepiece(checkpoint.path):
        beside = [checkpoint.path / name for name in _BESIDE]
        texts |= {path.name: path.read_text(encoding="utf-8") for path in beside if path.is_file()}
        templates = checkpoint.chat_templates
        if templates == templates_of(checkpoint.tokenizer_config):
            return texts
        if templates.keys() == {DEFAULT}:
            return texts | {CHAT_TEMPLATE_FILE: templates[DEFAULT]}
        texts.pop(CHAT_TEMPLATE_FILE, None)  # it would count alone
    of_tokenizer = json.dumps(tokenizer_config(checkpoint), indent=2, ensure_ascii=False)
    return texts | {"tokenizer_config.json": f"{of_tokenizer}\n"}


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tokenizer_config.json says, with the texts of the special tokens that the tokenizer has, and the model's
    chat templates from wherever it keeps them as `chat_template`. Raises as `Checkpoint.chat_templates`."""
    setting = template_setting(checkpoint.chat_templates)
    return {**checkpoint.tokenizer_config, **checkpoint.special_tokens, "chat_template": setting}


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The model's chat template, the default one of several; None where it brings none. Raises as
    `tokenizer_config`."""
    return checkpoint.chat_templates.get(DEFAULT)

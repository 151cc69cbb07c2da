"""The chat templates that a model brings, the special tokens that they name, and the tokens that end a turn."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import PackingError, UserError
from sparsepack.files.stored import Name, Stored, checked, shown
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE, DEFAULT, TOOL_USE, render_chat, templates_of

SPECIAL_TOKENS = "sparsepack.special_tokens"
"""The key of our GGUFs for the texts of the tokenizer's special tokens, as JSON: bos_token, pad_token and so on."""

CHAT_TEMPLATE_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSORS = ("chat_template.json", "processor_config.json")
_TOKEN_NAME = re.compile("[a-z0-9_]{1,60}_token")

_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|end|>"),
    *("<|end_of_turn|>", "<|endofturn|>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|END_OF_TURN_TOKEN|>", "<EOT>", "_<EOT>"),
)
"""Special tokens of these texts end a turn, or the whole text, in the models that have them; most are those that
llama.cpp knows by their texts."""


def folder_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by their names that a Hugging Face folder has.

    As AutoTokenizer takes them: those that are files of their own, else those of tokenizer_config.json. Where neither
    has a default one, it is the one that AutoProcessor would take: models with images keep it there. Raises
    `PackingError` for a file that is no text, or no JSON where it should be.
    """
    try:
        paths = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))} | {
            DEFAULT: folder / CHAT_TEMPLATE_FILE
        }
        found = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
        found = found or templates_of(tokenizer_config)
        for path in (folder / name for name in _OF_PROCESSORS):
            if DEFAULT not in found and path.is_file():
                found = templates_of(_object(path)) | found
    except (ValueError, RecursionError) as error:
        raise PackingError(f"{folder}: its chat template is no text ({shown(error)}); download it again") from error
    return found


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates by their names that a GGUF has, of those that transformers takes. Raises `ValueError` as
    `templates_of`."""
    keys = {DEFAULT: CHAT_TEMPLATE, TOOL_USE: f"{CHAT_TEMPLATE}.{TOOL_USE}"}
    return templates_of({"chat_template": {name: metadata.get(key) for name, key in keys.items()}})


def template_setting(templates: Mapping[str, str]) -> str | list[dict[str, str]] | None:
    """Templates as the `chat_template` of a tokenizer_config.json; None where there are none."""
    if templates.keys() <= {DEFAULT}:
        return templates.get(DEFAULT)
    return [{"name": name, "template": text} for name, text in templates.items()]


def read_special_tokens(text: str) -> dict[str, Any]:
    """What a GGUF of ours has under `SPECIAL_TOKENS`. Raises `ValueError` for what is none."""
    return named_tokens(checked(_SpecialTokens, {"tokens": json.loads(text)}).tokens)


class _SpecialTokens(Stored):
    tokens: dict[Name, Name]


def named_tokens(special_tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a transformers tokenizer as templates name them."""
    named = ((name, token) for name, token in special_tokens_map.items() if _TOKEN_NAME.fullmatch(name))
    return {name: token for name, token in named if isinstance(token, str) and token}


def turn_ends(template: str | None, special_tokens: Mapping[str, Any], added: Collection[str]) -> list[str]:
    """Those of a tokenizer's added tokens that end a turn: what the template writes behind an answer, and what is known
    to do so."""
    known = [token for token in _TURN_ENDS if token in added]
    if template is None:
        return known
    answer = "an answer of these words"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    try:
        rendered = render_chat(template, messages, add_generation_prompt=False, **special_tokens)
    except UserError:  # such a template is of no use in a conversation either, and says so there
        return known
    _, found, behind = rendered.rpartition(answer)
    behind = behind.lstrip()
    written = [token for token in added if token and found and behind.startswith(token)]
    return [max(written, key=len), *known] if written else known


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return value

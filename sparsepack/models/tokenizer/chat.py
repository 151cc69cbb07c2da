"""Conversations as the text that a chat model was trained on, by the template that it brings.

Templates come from strangers. They are run by transformers in jinja2's immutable sandbox: a template sees the messages
and the names of a few tokens, reads no file, calls nothing of Python, and changes nothing. It runs in a process of its
own with limits of time and memory (`sandbox`).

The chat templates that a model brings, the special tokens that they name, and the tokens that end a turn.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparsepack.errors import PackingError, UserError
from sparsepack.files.stored import Name, Stored, shown, validate
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

CHAT_TEMPLATE = "tokenizer.chat_template"
"""GGUFs hold their chat template under this standard key; one with another name, under the key with that name behind a
dot."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""transformers takes the template of the second name where there are tools, else that of the first."""

Message = Mapping[str, Any]
"""A message is `{"role": "system" | "user" | "assistant" | ..., "content": TEXT}`, as the OpenAI protocol and templates
have it; in place of the text may stand a list of parts, `{"type": "text", "text": TEXT}`."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of parts that are text, as the OpenAI protocols name them."""

LONGEST = 1 << 20
"""A template has at most this many characters; templates of known models have less than 20,000."""


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    **special_tokens: str | None,
) -> str:
    """The text of a conversation, special tokens spelled out, up to where the model's answer begins.

    template              -- the model's, jinja2; None: it has none
    tools                 -- that the model may call, as OpenAI's protocol has them
    add_generation_prompt -- end with what stands before an answer
    continue_final_message -- end within the last message, which the model goes on with; not with the one before
    variables             -- further ones of the template, such as `enable_thinking`; those above have precedence
    special_tokens        -- the texts of the tokenizer's, which templates name: bos_token, eos_token, pad_token, ...

    A message's content is given to the template in the form that it takes, as text or as a list of parts. Raises
    `UserError` where there is no template, a message is not one, or the template refuses the messages or fails.
    """
    if template is None:
        raise UserError(
            "no chat template: the model brings none, or was packed before sparsepack kept it; pack it again, give one "
            "(--chat-template FILE), or give a prompt to continue instead"
        )
    if len(template) > LONGEST:
        raise UserError(f"the chat template has {len(template):,} characters; expected at most {LONGEST:,}")
    plain = [_checked(number, message) for number, message in enumerate(messages)]
    if not plain:
        raise UserError("a conversation without messages; expected at least one")
    named = {name: token for name, token in special_tokens.items() if token is not None}
    return _rendered(
        template,
        [_in_form(message, template, tuple(sorted(named.items()))) for message in plain],
        **{
            **(variables or {}),
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **named,
        },
    )


def _rendered(template: str, conversation: list[dict[str, Any]], /, **variables: Any) -> str:
    try:
        text, _ = SANDBOX.call(
            "render_chat_template", template, conversation, variables, after=("chat", "load_chat_templates", ())
        )
    except (SandboxError, TypeError, ValueError, RecursionError) as error:  # what JSON cannot say is in the messages
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the model's chat template cannot take this conversation ({reason})") from error
    return str(text)


def templates_of(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by their names that tokenizer_config.json, or a file of its form, has. Raises `ValueError` for one
    that is no text."""
    found = tokenizer_config.get("chat_template")
    if isinstance(found, str):
        found = {DEFAULT: found}
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)]
        found = {entry["name"]: entry.get("template") for entry in named}
    templates = found.items() if isinstance(found, Mapping) else ()
    texts = {name: text for name, text in templates if isinstance(name, str) and isinstance(text, str) and text}
    for text in texts.values():
        text.encode()  # JSON can hold halves of characters
    return texts


def template_of(tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default one of `templates_of`."""
    return templates_of(tokenizer_config).get(DEFAULT)


def _checked(number: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"message {number}: expected a role and content, as {{'role': 'user', 'content': 'Hello'}}")
    if "content" not in message:
        raise UserError(f"message {number}: it has no content; expected text")
    content = message["content"]
    if content is None:  # beside calls of tools; transformers and most templates take it for an empty text
        content = ""
    if not isinstance(content, list | tuple):
        return {**message, "content": content}
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UserError(
                f"message {number}: a part of type {str(kind)[:40]!r}; expected text, as "
                "{'type': 'text', 'text': 'Hello'}: images, sound and files are not taken; leave it out"
            )
    return {**message, "content": [{"type": "text", "text": part["text"]} for part in content]}


def _in_form(message: dict[str, Any], template: str, special_tokens: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """A message with its content as the template takes it: as it is where that will do."""
    content = message["content"]
    if not isinstance(content, str | list):  # what the template may take or refuse
        return message
    takes_text, takes_parts = _forms(template, message["role"], special_tokens)
    if isinstance(content, str) and takes_parts and not takes_text:
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, list) and not takes_parts:
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


def writes_role(template: str, role: str, special_tokens: Mapping[str, str | None]) -> bool:
    """Whether a template writes what messages of a role say; some have no place for those of `system`."""
    named = {name: token for name, token in special_tokens.items() if token is not None}
    return any(_forms(template, role, tuple(sorted(named.items()))))


_WORD = "needle"
_WRITTEN_OUT = re.compile(rf"""["']text["']\s*:\s*["']{_WORD}""")


@lru_cache(maxsize=64)
def _forms(template: str, role: str, special_tokens: tuple[tuple[str, str], ...]) -> tuple[bool, bool]:
    """Whether a template writes the content of a role's messages where it is a text, and where it is a list of parts:
    tried out, as llama.cpp does."""

    def written(form: Callable[[str], Any]) -> bool:
        conversation = {
            "system": [("system", _WORD), ("user", "Hello")],
            "assistant": [("user", "Hello"), ("assistant", _WORD)],
        }.get(role, [("user", _WORD)])
        messages = [{"role": role, "content": form(text)} for role, text in conversation]
        try:
            text = _rendered(template, messages, tools=None, add_generation_prompt=False, **dict(special_tokens))
        except UserError:
            return False
        return _WORD in text and not _WRITTEN_OUT.search(text)  # a list as Python or JSON prints it is not taken

    return written(str), written(lambda text: [{"type": "text", "text": text}])


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
    return named_tokens(validate(_SpecialTokens, {"tokens": json.loads(text)}).tokens)


class _SpecialTokens(Stored):
    tokens: dict[Name, Name]


def named_tokens(special_tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a transformers tokenizer as templates name them."""
    named = ((name, token) for name, token in special_tokens_map.items() if _TOKEN_NAME.fullmatch(name))
    return {name: token for name, token in named if isinstance(token, str) and token}


def turn_ends(template: str | None, special_tokens: Mapping[str, Any], added: Collection[str]) -> list[str]:
    """Those of a tokenizer's added tokens that end a turn: what the template writes behind an answer, and what is known
    to do so."""
    # gpt-oss ends a message with <|end|>, of which an answer has several.
    known = [token for token in _TURN_ENDS if token in added and not (token == "<|end|>" and "<|channel|>" in added)]
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

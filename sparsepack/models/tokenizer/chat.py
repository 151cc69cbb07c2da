"""Conversations as the text that a chat model was trained on, by the template that it brings.

Templates come from strangers. They are run by transformers in jinja2's immutable sandbox: a template sees the messages
and the names of a few tokens, reads no file, calls nothing of Python, and changes nothing. It runs in a process of its
own with limits of time and memory (`sandbox`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparsepack.errors import UserError
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
    **special_tokens: str | None,
) -> str:
    """The text of a conversation, special tokens spelled out, up to where the model's answer begins.

    template              -- the model's, jinja2; None: it has none
    tools                 -- that the model may call, as OpenAI's protocol has them
    add_generation_prompt -- end with what stands before an answer
    continue_final_message -- end within the last message, which the model goes on with; not with the one before
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
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **named,
    )


def _rendered(template: str, conversation: list[dict[str, Any]], **variables: Any) -> str:
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

"""Conversations as the text that a chat model was trained on, by the template that it brings.

Templates come from strangers. They are run by transformers in jinja2's immutable sandbox: a template sees the messages
and the names of a few tokens, reads no file, calls nothing of Python, and changes nothing. It runs in a process of its
own with limits of time and memory (`sandbox`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepack.errors import UserError
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

CHAT_TEMPLATE = "tokenizer.chat_template"
"""GGUFs hold their chat template under this standard key."""

Message = Mapping[str, Any]
"""A message is `{"role": "system" | "user" | "assistant" | ..., "content": TEXT}`, as the OpenAI protocol and templates
have it."""

LONGEST = 1 << 20
"""A template has at most this many characters; templates of known models have less than 20,000."""


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The text of a conversation, special tokens spelled out, up to where the model's answer begins.

    template              -- the model's, jinja2; None: it has none
    tools                 -- that the model may call, as OpenAI's protocol has them
    bos_token, eos_token  -- their text, which templates name
    add_generation_prompt -- end with what stands before an answer
    continue_final_message -- end within the last message, which the model goes on with; not with the one before

    Raises `UserError` where there is no template, a message is not one, or the template refuses the messages or fails.
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
    return _rendered(
        template,
        plain,
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        bos_token=bos_token or "",
        eos_token=eos_token or "",
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


def template_of(tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template that tokenizer_config.json (or a tokenizer's settings) names: the default one of several."""
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)]
        found = {entry["name"]: entry.get("template") for entry in named}
    if isinstance(found, Mapping):
        found = found.get("default")
    return found if isinstance(found, str) and found else None


def _checked(number: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"message {number}: expected a role and content, as {{'role': 'user', 'content': 'Hello'}}")
    if "content" not in message:
        raise UserError(f"message {number}: it has no content; expected text")
    return dict(message)

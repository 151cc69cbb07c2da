"""A conversation on a terminal, or with the lines of a file or a pipe."""

import re
import sys
from collections.abc import Iterator, Sequence

from sparsepack.cli.options.texts import utf8
from sparsepack.cli.talk.streaming import Answers, stream
from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.progress import say
from sparsepack.runtime.generation.generate import Generated, Generation
from sparsepack.runtime.options import GenerateOptions

_FORGET, _END, _EXPLAIN = "/clear", ("/exit", "/quit", "/bye"), "/help"
_HELP = f"Type a message. {_FORGET} forgets the conversation, {_END[0]} or Ctrl-D ends, Ctrl-C stops an answer."
_COMMAND = re.compile(r"/[a-z?]+")
"""A line that is such a word alone is no message."""


def converse(
    model: Model, first: Sequence[str], options: GenerateOptions, system: str | None, json_path: str | None
) -> None:
    """Answer message after message, each with the conversation before it, which stays in the cache.

    first  -- messages to begin with. After them come those typed on a terminal; without them, each line of standard
              input where that is no terminal
    system -- what stands before the conversation

    Raises `UserError` for a conversation that the model's template does not take or that the context has no room for;
    on a terminal it says so and forgets the message.
    """
    typed = on_a_terminal()
    begun = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begun)
    if not first or typed:
        model.chat_prompt([*begun, {"role": "user", "content": "Hello"}])  # whether it can, before anybody types
    answers = Answers(model.engine, json_path)
    for text in _messages(first, typed):
        if typed and _COMMAND.fullmatch(command := text.strip()):
            if command in _END:
                break
            if command == _FORGET:
                messages = list(begun)
            else:
                say(_HELP if command == _EXPLAIN else f"{command}: no such command. {_HELP}")
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            generation = model.chat(asked, options)
        except UserError as error:
            if not typed:
                raise
            say(f"{error}; {_FORGET} forgets the conversation")
            continue
        made = _answered(generation, answers, typed)
        answers.add(text, made)
        messages = [*asked, {"role": "assistant", "content": made.text}]
    answers.close()


def on_a_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


def _messages(first: Sequence[str], typed: bool) -> Iterator[str]:
    yield from first
    if typed:
        say(_HELP)
        yield from _typed()
    elif not first:
        for line in sys.stdin.buffer:
            text = utf8(line, "standard input").rstrip("\r\n")
            if text.strip():
                yield text


def _typed() -> Iterator[str]:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() takes editing and history from it)
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return
        if line.strip():
            yield line


def _answered(generation: Generation, answers: Answers, typed: bool) -> Generated:
    try:
        return stream(generation, answers)
    except KeyboardInterrupt:
        if not typed:
            raise
        generation.close()
        answers.tell("\n")
        return generation.result()

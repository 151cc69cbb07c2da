"""Text on a terminal as it is written, one after the other or as a conversation."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparsepack.cli.command import json_text
from sparsepack.cli.shared import utf8
from sparsepack.errors import UserError
from sparsepack.files.atomic import write_bytes
from sparsepack.loading import Model, describe_runtime
from sparsepack.progress import say
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.generate import Generated, Generation
from sparsepack.runtime.options import GenerateOptions
from sparsepack.terminal import tell

_ENDED = {
    "eos": "the model ended it",
    "stop": "stopped at {!r}",
    "tokens": "that is as many as asked for",
    "context": "the context is full",
    "cancelled": "interrupted",
}


class Answers:
    """Texts go to standard output, or as JSON, a line for each, there (`json_path` is "-") or into a file.

    The file appears when all are made, by `close`.
    """

    def __init__(self, engine: Engine, json_path: str | None) -> None:
        self._engine, self._path = engine, json_path
        self._lines: list[str] = []
        say(describe_runtime(engine))

    def tell(self, text: str) -> None:
        """Text for people, at once; none where standard output is for JSON."""
        if self._path != "-":
            tell(text, end="")

    def add(self, prompt: str, made: Generated) -> None:
        """A text that has ended."""
        hits = self._engine.hit_counts
        say(summary(made, self._engine) + (f"; {hits.in_words}" if hits else ""))
        record = self._record(prompt, made) | {"served": hits.to_json() if hits else None}
        if self._path == "-":
            tell(json_text(record))
        elif self._path is not None:
            self._lines.append(f"{json.dumps(record, ensure_ascii=False)}\n")

    def close(self) -> None:
        """No more texts come."""
        if self._path not in (None, "-"):
            write_bytes(Path(str(self._path)), "".join(self._lines).encode())

    def _record(self, prompt: str, made: Generated) -> dict[str, Any]:
        bits = self._engine.packed.plane_bits
        return {
            "prompt": prompt,
            "text": made.text,
            "tokens": len(made.tokens),
            "token_ids": list(made.tokens),
            "stop_reason": made.reason,
            "stop": made.stop,
            "prompt_tokens": made.prompt_tokens,
            "prefilled": made.prefilled,
            "prefill_seconds": made.prefill_seconds,
            "decode_seconds": made.decode_seconds,
            "tokens_per_second": made.tokens_per_second,
            "skipped": made.skipped.overall if made.skipped else None,
            "skipped_of_sparse_sites": made.skipped.of_sparse_sites if made.skipped else None,
            "bits_read": bits and made.skipped and bits * (1 - made.skipped.overall),
            "drafted": made.drafted,
            "accepted": made.accepted,
            "runtime": self._engine.description,
            "dense": self._engine.dense,
        }


def stream(generation: Generation, answers: Answers) -> Generated:
    """Tell a text as it comes."""
    for piece in generation:
        answers.tell(piece)
    answers.tell("\n")
    return generation.result()


def print_texts(
    model: Model, prompts: Sequence[str], options: GenerateOptions, json_path: str | None, show_prompts: bool = True
) -> None:
    """Write a prompt and its continuation as it comes, or the continuations of several when all are made.

    show_prompts -- whether the prompts are printed, too
    """
    if len(prompts) == 1:
        generation = model.generate(prompts[0], options)
        answers = Answers(model.engine, json_path)
        if show_prompts:
            answers.tell(prompts[0])
        answers.add(prompts[0], stream(generation, answers))
    else:
        answers = Answers(model.engine, json_path)
        made_together = model.generate_together(prompts, options)
        for number, (prompt, made) in enumerate(zip(prompts, made_together, strict=True), 1):
            head = f"--- prompt {number}: {' '.join(prompt.split())}\n" if show_prompts else ""
            answers.tell(f"{head}{made.text}\n")
            answers.add(prompt, made)
    answers.close()


def summary(made: Generated, engine: Engine) -> str:
    """How a text was made, in one line."""
    before = made.prompt_tokens - made.prefilled
    prompt = f"{made.prompt_tokens} of the prompt{f', {before} of them from before,' if before else ''}"
    speed = f" ({made.tokens_per_second:.1f} tokens/s)" if made.tokens_per_second else ""
    drafted = f"; {made.accepted} of {made.drafted} drafted tokens accepted" if made.drafted else ""
    skipped = ""
    if made.skipped is not None:
        packed = engine.packed
        skipped = f"; {packed.describe_skipped(made.skipped, not engine.dense)}"
        skipped += " of each of the blocks' weights" if packed.plane_bits else " of the blocks' weights skipped"
    return (
        f"{len(made.tokens)} tokens in {made.decode_seconds:.2f} s{speed} after {prompt} in "
        f"{made.prefill_seconds:.2f} s; {_ENDED[made.reason].format(made.stop)}{skipped}{drafted}"
    )


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

"""`sparsepack generate`."""

import sys
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import PATH, Ruled, command, from_options, group, json_output, options_from
from sparsepack.cli.shared import (
    ARTIFACT,
    backend_option,
    device_option,
    engine_flags,
    engine_options,
    for_texts,
    slots,
    text_of,
    torch_threads,
)
from sparsepack.option import not_with, only_with
from sparsepack.runtime.backends import most_sequences
from sparsepack.runtime.options import CHAT_TOKENS, GenerateOptions

_CHAT = (only_with("chat"),)


@command(short_help="Continue a text, or converse, with a packed model.")
@click.argument("path", type=ARTIFACT)
@group(
    "Text",
    click.option(
        "--prompt",
        "prompts",
        multiple=True,
        help=f"Text to continue. Repeats, up to {most_sequences()} times: all are continued together.",
    ),
    click.option(
        "--prompt-file", "files", multiple=True, type=PATH, help="A file with such a text; - is standard input."
    ),
    click.option(
        "--no-display-prompt",
        cls=Ruled,
        is_flag=True,
        counts=(not_with("chat"), not_with("json_path", "-")),
        help="Print what is generated alone, not the prompt before it.",
    ),
    click.option("--chat", is_flag=True, help="Converse: on a terminal, or answer each line of standard input."),
    click.option("--system", cls=Ruled, counts=_CHAT, help="What --chat tells the model before the conversation."),
    click.option(
        "--chat-template",
        cls=Ruled,
        type=PATH,
        counts=_CHAT,
        help="A file with the template for --chat, in place of the model's own.",
    ),
)
@group(
    "How tokens are chosen",
    from_options(GenerateOptions, "-n", "--tokens"),
    options_from(GenerateOptions, "--stop", "--temperature", "--top-k", "--top-p", "--min-p"),
    options_from(GenerateOptions, "--repeat-penalty", "--repeat-last-n", "--frequency-penalty", "--presence-penalty"),
    options_from(GenerateOptions, "--seed", "--prompt-lookup"),
)
@for_texts
@slots
@engine_flags
@device_option
@backend_option
@torch_threads
@json_output
@click.pass_context
def generate(
    called: click.Context,
    /,
    path: Path,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    no_display_prompt: bool,
    chat: bool,
    system: str | None,
    chat_template: Path | None,
    json_path: str | None,
    **asked: Any,
) -> None:
    """Continue a prompt with a packed model, or converse with it.

    On a terminal a prompt that is not given is asked for. Text goes to standard output, what ran and how fast to
    stderr. With --json each text is a line of JSON: the text, its tokens, why it ended, tokens per second, the share of
    the weights that was skipped.
    """
    if not chat and not prompts and not files:
        prompts = _asked_for()
    if not chat and not prompts and not files:
        raise click.UsageError("nothing to continue: give --prompt TEXT, --prompt-file FILE or --chat")
    if len(files) != len(set(files)):
        raise click.UsageError("--prompt-file: a file is named twice")
    engine = engine_options(asked)
    texts = [*prompts, *(text_of(file) for file in files)]
    template = None if chat_template is None else text_of(chat_template)

    from dataclasses import replace

    from sparsepack.cli.talk import converse, print_texts
    from sparsepack.loading import load
    from sparsepack.progress import say
    from sparsepack.runtime.generation.generate import apply_suggestions, check_generate_options, describe_suggestions

    model = load(path, options=engine, sequences=1 if chat else len(texts))
    options, taken = apply_suggestions(GenerateOptions(**asked), model.packed.generation)
    options = check_generate_options(options, _flag)
    if taken:
        say(describe_suggestions(taken, _flag))
    if chat:
        if called.get_parameter_source("tokens") is click.core.ParameterSource.DEFAULT:
            options = replace(options, tokens=CHAT_TOKENS)
        converse(replace(model, chat_template=template or model.chat_template), texts, options, system, json_path)
    else:
        print_texts(model, texts, options, json_path, not no_display_prompt)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _asked_for() -> tuple[str, ...]:
    """The prompt that somebody at a terminal types when asked; none elsewhere, or where nothing is typed."""
    if not sys.stdin.isatty():
        return ()
    try:
        typed = click.prompt("Text to continue", default="", show_default=False, err=True)
    except click.Abort:  # by Ctrl-C or Ctrl-D
        return ()
    return (typed,) if typed.strip() else ()

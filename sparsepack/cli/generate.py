"""`sparsepack generate`."""

import sys
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options import (
    PATH,
    backend_option,
    device_option,
    from_options,
    json_output,
    seed_option,
    torch_threads,
)
from sparsepack.errors import UserError
from sparsepack.runtime.backends import most_sequences
from sparsepack.runtime.options import CHAT_TOKENS, GenerateOptions


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help=f"Text to continue. Repeats, up to {most_sequences()} times with --device cuda: all are continued together.",
)
@click.option("--prompt-file", "files", multiple=True, type=PATH, help="A file with such a text; - is standard input.")
@click.option("--chat", is_flag=True, help="Converse: on a terminal, or answer each line of standard input.")
@click.option("--system", help="What --chat tells the model before the conversation.")
@click.option("--chat-template", type=PATH, help="A file with the template for --chat, in place of the model's own.")
@from_options(
    GenerateOptions,
    "-n",
    "--tokens",
    type=click.IntRange(0),
    help=f"Tokens to generate at most; with --chat {CHAT_TOKENS} unless given.",
)
@from_options(GenerateOptions, "--stop", multiple=True, help="Text that ends what is generated, unprinted. Repeats.")
@from_options(GenerateOptions, "--temperature", help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@from_options(
    GenerateOptions,
    "--repeat-penalty",
    type=click.FloatRange(0, min_open=True),
    help="Makes tokens less likely that were there before, as in llama.cpp; 1 does nothing.",
)
@from_options(
    GenerateOptions,
    "--repeat-last-n",
    type=click.IntRange(-1),
    help="How many of the last tokens count as there before; -1 for all.",
)
@seed_option
@click.option("--dense", is_flag=True, help="Skip nothing.")
@click.option("--context", type=click.IntRange(2), help="Room for so many tokens.")
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
    chat: bool,
    system: str | None,
    chat_template: Path | None,
    dense: bool,
    context: int | None,
    device: str,
    backend: str | None,
    json_path: str | None,
    **asked: Any,
) -> None:
    """Continue a prompt with a zigzag artifact, or converse with it.

    Text goes to standard output, what ran and how fast to stderr. With --json each text is a line of JSON: the text,
    its tokens, why it ended, tokens per second, the share of the weights that was skipped.
    """
    if not chat and (system is not None or chat_template is not None):
        raise click.UsageError("--system and --chat-template are for conversations: give --chat too")
    if not chat and not prompts and not files:
        raise click.UsageError("nothing to continue: give --prompt TEXT, --prompt-file FILE or --chat")
    if len(files) != len(set(files)):
        raise click.UsageError("--prompt-file: a file is named twice")
    texts = [*prompts, *(_text_of(file) for file in files)]
    template = None if chat_template is None else _text_of(chat_template)

    from dataclasses import replace

    from sparsepack.cli.chat import converse
    from sparsepack.cli.streaming import print_one, print_together
    from sparsepack.load import load, load_several

    options = GenerateOptions(**asked)
    if chat:
        if called.get_parameter_source("tokens") is click.core.ParameterSource.DEFAULT:
            options = replace(options, tokens=CHAT_TOKENS)
        model = load(path, device, context, dense=dense, backend=backend)
        converse(replace(model, chat_template=template or model.chat_template), texts, options, system, json_path)
    elif len(texts) == 1:
        print_one(load(path, device, context, dense=dense, backend=backend), texts[0], options, json_path)
    else:
        several = load_several(path, len(texts), device, context, dense=dense, backend=backend)
        print_together(several, texts, options, json_path)


def _text_of(path: Path) -> str:
    """A file's text without the end of its last line; `-` is standard input."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a text file") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text (byte {error.start} is not UTF-8); expected a text file in UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")

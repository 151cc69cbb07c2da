"""`sparsepack generate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options import PATH, backend_option, device_option, from_options, torch_threads
from sparsepack.runtime.backends import most_sequences
from sparsepack.runtime.options import GenerateOptions


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    help=f"Text to continue. Repeats, up to {most_sequences()} times with --device cuda: all are continued together.",
)
@from_options(GenerateOptions, "-n", "--tokens")
@from_options(GenerateOptions, "--temperature")
@from_options(GenerateOptions, "--top-k")
@from_options(GenerateOptions, "--top-p")
@from_options(GenerateOptions, "--seed")
@click.option("--dense", is_flag=True, help="Skip nothing.")
@click.option(
    "--context",
    type=click.IntRange(2),
    help="Room for so many tokens (default: what the model was made for, at most 4096).",
)
@device_option
@backend_option
@torch_threads
def generate(
    path: Path,
    prompts: tuple[str, ...],
    dense: bool,
    context: int | None,
    device: str,
    backend: str | None,
    **asked: Any,
) -> None:
    """Continue a prompt with a zigzag artifact. Text goes to standard output, what ran and how fast to stderr."""
    from sparsepack.cli.streaming import print_together, stream
    from sparsepack.load import load, load_several

    options = GenerateOptions(**asked)
    if len(prompts) == 1:
        stream(load(path, device, context, dense=dense, backend=backend), prompts[0], options)
    else:
        model = load_several(path, len(prompts), device, context, dense=dense, backend=backend)
        print_together(model, prompts, options)

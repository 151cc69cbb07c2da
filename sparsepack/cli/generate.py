"""`sparsepack generate`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options import PATH, backend_option, device_option, seed_option, torch_threads
from sparsepack.runtime.options import GenerateOptions


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    help="Text to continue. Repeats, up to 8 times with --device cuda: all are continued together.",
)
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(0),
    default=GenerateOptions.tokens,
    show_default=True,
    help="Tokens to generate at most.",
)
@click.option(
    "--temperature", default=GenerateOptions.temperature, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-k", type=click.IntRange(1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@seed_option
@click.option("--dense", is_flag=True, help="Skip nothing.")
@click.option("--context", type=click.IntRange(2), help="Room for so many tokens.")
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

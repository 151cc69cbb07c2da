"""What `calibrate` and `trace` share: each runs a model over texts, or merges two of the folders that it made."""

from collections.abc import Callable
from pathlib import Path

import click

from sparsepack.cli.options.declared import PATH
from sparsepack.cli.options.output import OUTPUT
from sparsepack.cli.options.verb import F, group, together, was_given

_MERGES = ("model", "folders", "output", "overwrite", "quiet")
"""What a merge takes."""


def over_texts(output: str) -> Callable[[F], F]:
    """The arguments and options of such a verb; `output` is the help of -o."""
    return together(
        click.argument("model"),
        click.argument("folders", nargs=-1, type=PATH),
        click.option("--text", "texts", multiple=True, help="What to run; repeats."),
        group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help=output)),
    )


def merges(verb: str, what: str, model: str, folders: tuple[Path, ...], texts: tuple[str, ...]) -> bool:
    """Whether two folders are merged, rather than a model run. Raises `click.UsageError` for what is neither."""
    if model == "merge":
        if len(folders) != 2 or texts:
            raise click.UsageError(f"merge takes two {what} and -o: sparsepack {verb} merge A B -o C")
        ctx = click.get_current_context()
        for option in ctx.command.params:
            if option.name not in _MERGES and was_given(ctx, str(option.name)):
                raise click.UsageError(f"{max(option.opts, key=len)}: merge runs nothing; leave it out")
        return True
    if folders or not texts:
        raise click.UsageError(f"give one MODEL and --text: sparsepack {verb} MODEL --text FILE -o FOLDER")
    return False

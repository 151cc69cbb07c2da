"""`sparsepack card`."""

from pathlib import Path

import click

from sparsepack.cli.command import PATH, Ruled, verb
from sparsepack.cli.shared import ARTIFACT
from sparsepack.option import only_with
from sparsepack.terminal import tell

measured = click.option(
    "--results",
    type=PATH,
    multiple=True,
    help="What was measured: report.json of a recipe, or what eval and bench wrote with --json. Repeats.",
)


@verb(short_help="Write the model card of an artifact.")
@click.argument("artifact", type=ARTIFACT)
@measured
@click.option("--name", help="Its heading (default: the source model's name).")
@click.option("-o", "--output", type=PATH, help="README.md beside the artifact, say (default: standard output).")
@click.option(
    "--overwrite",
    cls=Ruled,
    is_flag=True,
    help="Replace an output that exists.",
    counts=(only_with("output"),),
)
def card(artifact: Path, results: tuple[Path, ...], name: str | None, output: Path | None, overwrite: bool) -> None:
    """Write the model card of an ARTIFACT: what was done, how accurate and fast it is, how to load it."""
    from sparsepack.files.atomic import check_output, write_bytes
    from sparsepack.publish.card import model_card

    if output is not None:
        check_output(output, overwrite)
    made = model_card(artifact, results, name)
    if output is None:
        tell(made, end="")
    else:
        write_bytes(output, made.encode())

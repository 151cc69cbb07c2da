"""`sparsepack card`, `push` and `report`: what others see of an artifact or a run."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import PATH, Ruled, command
from sparsepack.cli.shared import ARTIFACT
from sparsepack.option import only_with
from sparsepack.terminal import tell

measured = click.option(
    "--results",
    type=PATH,
    multiple=True,
    help="What was measured: report.json of a recipe, or what eval and bench wrote with --json. Repeats.",
)


@command(short_help="Write the model card of an artifact.")
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


@command(short_help="Upload an artifact with its card to the Hugging Face hub.")
@click.argument("artifact", type=ARTIFACT)
@click.argument("repository", metavar="OWNER/NAME")
@measured
@click.option("--private", is_flag=True, help="Where the repository is made anew: others do not see it.")
@click.option("--revision", help="Branch to commit to, which must exist (default: the main one).")
@click.option("--message", help="Of the commit (default: Add and the artifact's name).")
@click.option("--dry-run", is_flag=True, help="Check it and list the files and their bytes; upload nothing.")
def push(artifact: Path, repository: str, results: tuple[Path, ...], dry_run: bool, **asked: Any) -> None:
    """Check an ARTIFACT, then upload it with its model card to OWNER/NAME on the Hugging Face hub, in one commit.

    Only the files that the artifact is made of go up, and the card as README.md; what else lies in its folder does not.
    """
    from sparsepack.publish import hub

    if not dry_run:
        tell(hub.push(artifact, repository, results, **asked))
        return
    from sparsepack.tables import Table, markdown

    upload = hub.planned_upload(artifact, repository, results)
    rows = [[name, f"{size:,}"] for name, size in upload.bytes.items()]
    rest = f"; {upload.left} other files or folders stay here" if upload.left else ""
    tell(
        markdown(
            Table(["file", "bytes"], rows), f"{repository}: {sum(upload.bytes.values()):,} bytes would go up{rest}"
        )
    )


@command(short_help="Make one HTML page of a recipe's run.")
@click.argument("work", type=PATH)
@click.option("-o", "--output", type=PATH, help="The page (default WORK/report.html); one that exists is replaced.")
def report(work: Path, output: Path | None) -> None:
    """Make one page of HTML of a recipe's run in the folder WORK: accuracy, what is skipped where, speed, gates."""
    from sparsepack.files.atomic import check_output, write_bytes
    from sparsepack.publish.page import report_page

    output = output if output is not None else work / "report.html"
    made = report_page(work)
    check_output(output, overwrite=True)
    write_bytes(output, made.encode())
    tell(str(output))

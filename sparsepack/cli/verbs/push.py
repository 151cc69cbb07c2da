"""`sparsepack push`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import verb
from sparsepack.cli.shared import ARTIFACT
from sparsepack.cli.verbs.card import measured
from sparsepack.terminal import tell


@verb(short_help="Upload an artifact with its card to the Hugging Face hub.")
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

"""`sparsepack push`."""

from pathlib import Path

import click

from sparsepack.cli.card import measured
from sparsepack.cli.options import ARTIFACT
from sparsepack.cli.verb import verb


@verb(short_help="Upload an artifact with its card to the Hugging Face hub.")
@click.argument("artifact", type=ARTIFACT)
@click.argument("repository", metavar="OWNER/NAME")
@measured
@click.option("--private", is_flag=True, help="Where the repository is made anew: others do not see it.")
@click.option("--revision", help="Branch to commit to, which must exist (default: the main one).")
@click.option("--message", help="Of the commit (default: Add and the artifact's name).")
def push(
    artifact: Path, repository: str, results: tuple[Path, ...], private: bool, revision: str | None, message: str | None
) -> None:
    """Check an ARTIFACT, then upload it with its model card to OWNER/NAME on the Hugging Face hub, in one commit."""
    from sparsepack.publish.hub import push as upload

    click.echo(upload(artifact, repository, results, private=private, revision=revision, message=message))

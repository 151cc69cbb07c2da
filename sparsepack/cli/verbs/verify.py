"""`sparsepack verify`."""

import sys
from pathlib import Path

import click

from sparsepack.cli.command import emit, json_output, verb
from sparsepack.cli.shared import ARTIFACT


@verb(short_help="Check that an artifact is whole, and of which model.")
@click.argument("path", type=ARTIFACT)
@click.option("--against", metavar="MODEL", help="Compare every matrix with this checkpoint.")
@json_output
def verify(path: Path, against: str | None, json_path: str | None) -> None:
    """Check an artifact: every byte's hash, shapes, padding; with --against, that it is that model. Exit 1 if not."""
    from sparsepack.cli.tables import verification
    from sparsepack.formats.verify import verify as check

    report = check(path, against)
    emit(report.to_json(), json_path, verification)
    if not report.passed:
        sys.exit(1)

"""`sparsepack report`."""

from pathlib import Path

import click

from sparsepack.cli.command import PATH, verb
from sparsepack.terminal import tell


@verb(short_help="Make one HTML page of a recipe's run.")
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

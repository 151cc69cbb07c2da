"""`sparsepack run`."""

import contextlib
import sys
from pathlib import Path

import click

from sparsepack.cli.options import PATH, json_output, print_json


@click.command()
@click.argument("recipe", type=PATH)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="activation_sparsity.sparsity=0.4; repeats."
)
@click.option("-w", "--work", type=PATH, help="Folder of the outputs (default work/NAME); done stages are kept.")
@click.option("--dry-run", is_flag=True, help="Print what would be made: matches, sizes, bits per weight, memory.")
@json_output
def run(recipe: Path, overrides: tuple[str, ...], work: Path | None, dry_run: bool, json_path: str | None) -> None:
    """Run a RECIPE: calibrate, pack, verify, eval, bench and generate from one YAML file. Exit 3 if a gate fails."""
    from sparsepack.files.atomic import write_json
    from sparsepack.recipe import run_recipe

    # With JSON on standard output, the tables stand aside.
    with contextlib.redirect_stdout(sys.stderr if json_path == "-" else sys.stdout):
        outcome = run_recipe(recipe, overrides, work, dry_run)
    if json_path == "-":
        print_json(outcome.report)
    elif json_path:
        write_json(Path(json_path), outcome.report)
    if not outcome.passed:
        sys.exit(3)

"""`sparsepack run`."""

import contextlib
import sys
from pathlib import Path

import click

from sparsepack.cli.command import PATH, command, json_output, print_json
from sparsepack.terminal import tell


def _print_list(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from sparsepack.recipe.load import listed

    tell(listed())
    context.exit()


def _print_schema(context: click.Context, parameter: click.Parameter, form: str | None) -> None:
    if form is None or context.resilient_parsing:
        return
    import json

    from sparsepack.recipe.schema import json_schema, markdown

    tell(markdown() if form == "markdown" else json.dumps(json_schema(), indent=2) + "\n", end="")
    context.exit()


@command(short_help="Do several of these steps from one YAML file, a recipe.")
@click.argument("recipe", type=PATH)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_list,
    help="Print the names of the recipes that ship with sparsepack, and stop.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="activation_sparsity.sparsity=0.4; repeats."
)
@click.option("-w", "--work", type=PATH, help="Folder of the outputs (default work/NAME); done stages are kept.")
@click.option("--overwrite", is_flag=True, help="Replace what another recipe, or nobody's, left in the work folder.")
@click.option("--dry-run", is_flag=True, help="Print what would be made: paths, matches, sizes, memory.")
@click.option(
    "--schema",
    type=click.Choice(("json", "markdown")),
    is_flag=False,
    flag_value="json",
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print every key of a recipe, as JSON Schema or as a page to read, and stop.",
)
@json_output
def run(
    recipe: Path,
    overrides: tuple[str, ...],
    work: Path | None,
    overwrite: bool,
    dry_run: bool,
    json_path: str | None,
) -> None:
    """Run a RECIPE: calibrate, prune, pack, verify, eval, bench, generate from one YAML file. Exit 3 if a gate fails.

    RECIPE is a YAML file, or the bare name of one that ships with sparsepack: see --list.

    Relative paths in it start at the working directory. A work folder in which another recipe ran (another name, file
    or model) is refused without --overwrite.
    """
    from sparsepack.files.records import write_result
    from sparsepack.recipe import run_recipe

    # With JSON on standard output, the tables stand aside.
    with contextlib.redirect_stdout(sys.stderr if json_path == "-" else sys.stdout):
        outcome = run_recipe(recipe, overrides, work, dry_run, overwrite)
    if json_path == "-":
        print_json(outcome.report)
    elif json_path:
        write_result(Path(json_path), outcome.report)
    if not outcome.passed:
        sys.exit(3)

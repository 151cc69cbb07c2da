"""The commands that are made from what an operation declares."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from sparsepack.cli.command import (
    OUTPUT,
    PATH,
    F,
    Ruled,
    command,
    element_of,
    from_options,
    group,
    overwrite_flag,
    taken,
    together,
    was_given,
)
from sparsepack.cli.shared import (
    CALIBRATION,
    compute,
    device_option,
    devices_option,
    dry_run_option,
    shard_of,
    tell_forecast,
)
from sparsepack.operation import Input, Operation, function
from sparsepack.option import default_of
from sparsepack.terminal import tell

_COMPUTE = ("device", "dtype")
_MERGE = ("model", "folders", "output", "overwrite", "quiet")
"""What a merge takes."""


def command_of(operation: Operation, options: Callable[[F], F] | None = None) -> click.Command:
    """The command of an operation. options -- its own, where another command has the same"""

    def run(output: Path, overwrite: bool, dry_run: int | None = None, **given: Any) -> None:
        values = taken(given, operation.options)
        for name, example in operation.examples.items():
            if values[name] is None:
                raise click.UsageError(f"give --{name}, for example {example}")
        settings = operation.options(**values)
        settings.check()
        if operation.merge is not None:
            folders, given["text"] = given.pop("folders"), given.pop("texts")
            if _merges(operation, given["model"], folders, given["text"]):
                tell(operation.table(function(operation.merge[1])(*folders, output, overwrite), output))
                return
        operation.check(settings, **{name: given[name] for name in operation.inputs})
        if dry_run is not None:
            tell_forecast(
                lambda workers: function(operation.forecast)(options=settings, workers=workers, **given), dry_run
            )
            return
        given |= {"output": output, "overwrite": overwrite}
        if not operation.forecast:
            made = function(operation.run)(options=settings, **given)
        else:
            with shard_of(where := {"device": settings.device}) as shard:
                on_device = replace(settings, device=where["device"])
                made = function(operation.run)(options=on_device, shard=shard, **given)
                if not shard.first:
                    return
        tell(operation.table(made, output))

    to_make = group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help=operation.output))
    over_text = operation.merge is not None
    text = click.option("--text", "texts", multiple=True, help="What to run; repeats.")
    parameters = together(
        click.argument("model"),
        *((click.argument("folders", nargs=-1, type=PATH), text, to_make) if over_text else ()),
        *_inputs(operation, ""),
        options or _options(operation),
        *(() if over_text else (to_make,)),
        compute if "dtype" in get_type_hints(operation.options) else device_option,
        *((devices_option, dry_run_option) if operation.forecast else ()),
        overwrite_flag,
    )
    made: click.Command = command(operation.name, short_help=operation.summary, help=operation.help)(parameters(run))
    return made


def _options(operation: Operation) -> Callable[[F], F]:
    """The flags of all its options, as they are declared, with other inputs among them."""
    headings = {name: heading for heading, names in operation.groups.items() for name in names}
    flags: list[Callable[[F], F]] = []
    for name, annotation in get_type_hints(operation.options).items():
        flags += _inputs(operation, name)
        if name not in _COMPUTE:
            required = default_of(operation.options, name) is None and type(None) not in get_args(annotation)
            names = [f"--{name.replace('_', '-')}"]
            if (element := element_of(annotation)) is not None:
                names = [f"--{fields(element)[0].name}", name]
            flag = from_options(operation.options, *names, required=required)
            flags.append(group(headings[name], flag) if name in headings else flag)
    return together(*flags)


def _inputs(operation: Operation, before: str) -> list[Callable[[F], F]]:
    """The flags of the inputs that stand before an option, or before all."""
    return [_input(name, each) for name, each in operation.inputs.items() if each.before == before]


def _input(name: str, found: Input) -> Callable[[F], F]:
    kind = {"type": CALIBRATION} if name == "calibration" else {"metavar": "MODEL"}
    return click.option(
        f"--{name}",
        cls=Ruled,
        required=found.required,
        help=found.help,
        counts=found.counts,
        **kind,  # type: ignore
    )


def _merges(operation: Operation, model: str, folders: tuple[Path, ...], texts: tuple[str, ...]) -> bool:
    """Whether two folders are merged, rather than a model run. Raises `click.UsageError` for what is neither."""
    assert operation.merge is not None
    if model == "merge":
        if len(folders) != 2 or texts:
            what = f"merge takes two {operation.merge[0]} and -o"
            raise click.UsageError(f"{what}: sparsepack {operation.name} merge A B -o C")
        ctx = click.get_current_context()
        for option in ctx.command.params:
            if option.name not in _MERGE and was_given(ctx, str(option.name)):
                raise click.UsageError(f"{max(option.opts, key=len)}: merge runs nothing; leave it out")
        return True
    if folders or not texts:
        raise click.UsageError(f"give one MODEL and --text: sparsepack {operation.name} MODEL --text FILE -o FOLDER")
    return False

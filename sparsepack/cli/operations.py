"""The commands that are made from what an operation declares."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
from sparsepack.cli.command import (
    OUTPUT,
    PATH,
    Existing,
    F,
    Ruled,
    command,
    element_of,
    emit,
    from_options,
    group,
    json_output,
    overwrite_flag,
    taken,
    together,
    was_given,
)
from sparsepack.cli.shared import (
    CALIBRATION,
    RUNS,
    allocation,
    attention,
    backend_option,
    device_option,
    devices_option,
    dry_run_option,
    engine_flags,
    engine_options,
    refit,
    slots,
    tell_forecast,
    threads_option,
    torch_threads,
)
from sparsepack.operation import Input, Operation, function, parts_of
from sparsepack.option import default_of, options_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.terminal import tell

_COMPUTE = ("device", "dtype")
_MERGE = ("model", "folders", "output", "overwrite", "quiet")
"""What a merge takes."""
_PARTS = {
    AllocationOptions: allocation,
    AttentionOptions: attention,
    RefitOptions: refit,
    EngineOptions: together(slots, engine_flags),
}
"""The flags of options that several operations have."""


def command_of(operation: Operation) -> click.Command:
    """The command of an operation."""
    subject, expected = operation.subject
    keyword = "request" if subject in {field.name for field in fields(operation.options)} else "options"

    def run(dry_run: int | None = None, json_path: str | None = None, **given: Any) -> None:
        output, folders = given.get("output", Path()), given.pop("folders", ())
        if operation.merge is not None:
            given["text"] = given.pop("texts")
        settings = _settings(operation, given)
        if operation.merge is not None and _merges(operation, given["model"], folders, given["text"]):
            made = function(operation.merge[1])(*folders, output, given["overwrite"])
            tell(operation.table(made, output))
            return
        if keyword == "request":
            given = {}
        operation.check(settings, **{name: given[name] for name in operation.inputs if name in given})
        if dry_run is not None:
            read = {name: value for name, value in given.items() if name not in ("output", "overwrite")}
            tell_forecast(partial(function(operation.forecast), **{keyword: settings}, **read), dry_run)
            return
        if not operation.forecast:
            made = function(operation.run)(**{keyword: settings}, **given)
        else:
            from sparsepack.workers.joined import joined

            with joined(settings.device) as shard:
                on_device = replace(settings, device=shard.device)
                made = function(operation.run)(**{keyword: on_device}, shard=shard, **given)
                if not shard.first:
                    return
        if operation.output:
            tell(operation.table(made, output))
        else:
            emit(made, json_path, lambda result: operation.table(result, output))
        operation.notes(made)

    text = click.option("--text", "texts", multiple=True, help="What to run; repeats.")
    to_make = click.option("-o", "--output", type=PATH, required=True, help=operation.output)
    flags = [*_flags(operation)]
    of_output = [flag for heading, flag in flags if heading == OUTPUT]
    if operation.output:
        of_output.insert(0, group(OUTPUT, to_make))
    parameters = together(
        click.argument(subject, type=Existing(expected) if expected else None),
        *((click.argument("folders", nargs=-1, type=PATH), text, *of_output) if operation.merge else ()),
        *(flag for heading, flag in flags if heading != OUTPUT),
        *(() if operation.merge else of_output),
        *_compute(operation),
        overwrite_flag if operation.output else json_output,
    )
    made: click.Command = command(operation.name, short_help=operation.summary, help=operation.help)(parameters(run))
    return made


def _settings(operation: Operation, given: dict[str, Any]) -> Any:
    """The option dataclass of an operation, from the flags of its options, taken out of `given`; checked. Raises
    `click.UsageError` where one has to be given and is not."""
    shared = {name: given[name] for name in _COMPUTE if name in given}
    parts, values = parts_of(operation.options), dict[str, Any]()
    own = {field.name for field in fields(operation.options)} - parts.keys()
    for name, part in parts.items():
        if part is EngineOptions:
            values[name] = engine_options(given, operation.options)
            continue
        found = taken(given, part, {*own, *_COMPUTE})
        if not any(value is None and _is_required(part, each) for each, value in found.items()):
            values[name] = part(**found, **{each: shared[each] for each in shared.keys() & get_type_hints(part)})
    values |= taken(given, operation.options)
    for name, example in operation.examples.items():
        if values[name] is None:
            raise click.UsageError(f"give --{name}, for example {example}")
    settings = operation.options(**values)
    if hasattr(settings, "check"):  # others check themselves as soon as they are made
        settings.check()
    return settings


def _is_required(options: type, name: str) -> bool:
    return default_of(options, name) is None and type(None) not in get_args(get_type_hints(options)[name])


def _flags(operation: Operation) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The flags of all its options, as they are declared, with the inputs among them, each with its heading."""
    headings = {name: heading for heading, names in operation.groups.items() for name in names}
    options, hints, parts = operation.options, get_type_hints(operation.options), parts_of(operation.options)

    def under(name: str, flag: Callable[[Any], Any]) -> tuple[str, Callable[[Any], Any]]:
        heading = headings.get(name, "")
        return heading, group(heading, flag) if heading else flag

    shared = next((part for part in options.__mro__ if part in _PARTS), None)
    places = {name: found.before or (name if name in hints else "") for name, found in operation.inputs.items()}
    for field in ("", *hints):
        yield from (under(each, _input(each, operation.inputs[each])) for each, at in places.items() if at == field)
        if field == "" and shared is not None:
            yield "", _PARTS[shared]
        elif field in parts:
            yield "", _PARTS[parts[field]]
        elif field in options_of(options).keys() - {*_COMPUTE} and not (shared and field in options_of(shared)):
            names = operation.flags.get(field, (f"--{field.replace('_', '-')}",))
            if (element := element_of(hints[field])) is not None:
                names = (f"--{fields(element)[0].name}", field)
            yield under(field, from_options(options, *names, required=_is_required(options, field)))


def _input(name: str, found: Input) -> Callable[[F], F]:
    kinds: dict[str, Any] = {"calibration": {"type": CALIBRATION}, "thresholds": {"type": PATH}, "text": {}}
    kind = kinds.get(name, {"metavar": "MODEL"})
    return click.option(f"--{name}", cls=Ruled, required=found.required, help=found.help, counts=found.counts, **kind)


def _compute(operation: Operation) -> list[Callable[[F], F]]:
    """Where and how it runs."""
    hints, parts = get_type_hints(operation.options), parts_of(operation.options).values()
    flags = [device_option]
    if any("dtype" in get_type_hints(each) for each in (operation.options, *parts)):
        flags.append(group(RUNS, from_options(CalibrateOptions, "--dtype", counts=operation.dtype_counts)))
    if operation.forecast:
        flags += [devices_option, dry_run_option]
    if EngineOptions in parts:
        flags += [torch_threads] if "runtime" in hints else [backend_option, threads_option]
    return flags


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

"""What every command is made of: options in groups, refused where they do nothing beside the others, and results as
tables and as JSON. Only click is imported here.
"""

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from sparsepack.errors import UserError
from sparsepack.option import Condition, Option, default_of, idle, is_missing_path, options_of
from sparsepack.terminal import is_terminal, printable, tell
from sparsepack.workers.launch import several

F = TypeVar("F", bound=Callable[..., Any])
EFFECTIVE = "sparsepack.effective"
"""Under this name it has the names of the options that have an effect beside the others that were given."""
MODELS, TEXTS = ("model", "subject", "against", "teacher"), ("texts", "text", "perplexity")
"""The parameters that name a model or an artifact, and texts: paths, or names on the hub."""
OUTPUTS = ("output", "json_path", "plot_path")
"""The parameters that name what a command writes; all others may name what it reads."""
ARGUMENTS = "sparsepack.arguments"
"""Under this name click's context has the arguments of the whole command line."""

_GROUPS: dict[click.Parameter, str] = {}
"""The heading under which the help shows an option, where that is another than "Options"."""


class Existing(click.Path):
    """A path of what a command reads: where there is nothing, that is said before anything is imported.

    expected -- what should be there, for the line that refuses it
    """

    def __init__(self, expected: str) -> None:
        super().__init__(path_type=Path)
        self.expected = expected

    def check(self, value: Path | tuple[Path, ...] | None) -> None:
        """Raise `UserError` for the first path that leads nowhere, or that the system refuses."""
        for path in value if isinstance(value, tuple) else () if value is None else (value,):
            try:
                os.lstat(path)
            except OSError as error:
                nothing = error.errno in (errno.ENOENT, errno.ENOTDIR)
                reason = "no such file or folder" if nothing else f"cannot be read ({error.strerror})"
                raise UserError(f"{path}: {reason}; expected {self.expected}") from error


class Ruled(click.Option):
    """An option that counts only beside certain values of others, `counts`."""

    def __init__(self, *args: Any, counts: Iterable[Condition] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.counts = tuple(counts)


class Command(click.Command):
    """A command of sparsepack."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Raises `UserError` before that where an option was given that does nothing, and for one of several
        workers where the command takes none."""
        if several() and "devices" not in {str(each.name) for each in self.params}:
            raise UserError(f"{self.name} runs in one process; start it without torchrun, or unset WORLD_SIZE")
        options = {str(each.name): each for each in self.params if isinstance(each, click.Option)}
        given = [name for name in options if was_given(ctx, name)]

        def counts(name: str) -> tuple[Condition, ...]:
            option = options[name]
            return option.counts if isinstance(option, Ruled) else ()

        def flag(name: str) -> str:
            return max(options[name].opts, key=len) if name in options else name.replace("_", "-")

        for name in given:
            for condition in counts(name):
                if condition.takes and not was_given(ctx, condition.field):
                    ctx.params[condition.field] = condition.values[0]
        for line in idle(given, ctx.params.get, counts, flag):
            raise UserError(line)
        ctx.meta[EFFECTIVE] = [name for name in options if not [*idle([name], ctx.params.get, counts, flag)]]
        for parameter in self.params:
            if isinstance(parameter.type, Existing):
                parameter.type.check(ctx.params[str(parameter.name)])
        self._check_names(ctx.params)
        self._check_outputs(ctx.params)
        return super().invoke(ctx)

    def _check_names(self, values: Mapping[str, Any]) -> None:
        """Raise `UserError` for a model or a text that is a path to nothing, before anything is imported."""
        from sparsepack.files.text import OPENERS, TEXT_SUFFIXES, path_and_field

        expected = "a model's folder, a .gguf file, or the name of a model on the hub"
        of_text = (
            "a .txt, .jsonl, .json, .csv or .tsv file (also .xz, .gz), a .parquet file, a folder of them, "
            "shipped:train, or the name of a data set on the hub"
        )
        kinds = ((MODELS, (".gguf",), expected), (TEXTS, (*TEXT_SUFFIXES, *OPENERS), of_text))
        for names, suffixes, what in kinds:
            for value in (values.get(name) for name in names):
                for each in value if isinstance(value, tuple) else (value,):
                    if isinstance(each, str) and is_missing_path(str(path_and_field(each)[0]), *suffixes):
                        raise UserError(f"{each}: no such file or folder; expected {what}")

    def _check_outputs(self, values: Mapping[str, Any]) -> None:
        """Raise `UserError` for an output that exists and is not to be replaced, or that is an input, too."""
        outputs = [Path(values[name]) for name in OUTPUTS if values.get(name) not in (None, "-")]
        if values.get("output") is not None and values.get("overwrite") is False and values.get("dry_run") is None:
            from sparsepack.files.atomic import check_free

            check_free(Path(values["output"]), overwrite=False)
        if not any(map(os.path.lexists, outputs)):
            return
        from sparsepack.files.atomic import check_inputs

        given = [value for name, value in values.items() if name not in OUTPUTS]
        flat = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
        inputs = [Path(each) for each in flat if isinstance(each, str | Path) and str(each)]
        for output in outputs:
            check_inputs(output, [*inputs, *(each for each in outputs if each is not output)])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of each group under its heading; the ones that every command has come last."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        others: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                everywhere = parameter.name in ("quiet", "help")
                (others if everywhere else groups.setdefault(_GROUPS.get(parameter, "Options"), [])).append(record)
        for title, records in (*groups.items(), ("Others", others)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


command = functools.partial(click.command, cls=Command)
"""`click.command` for one of ours."""


def was_given(ctx: click.Context, name: str) -> bool:
    """Whether somebody gave an option, by the command line or the environment."""
    sources = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    return ctx.get_parameter_source(name) in sources


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several decorators as one, the first outermost."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(decorators), command)


def group(title: str, *decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, under a heading of their own in the help."""

    def add(command: F) -> F:
        before = len(_options_at(command))
        made = together(*decorators)(command)
        for parameter in _options_at(made)[before:]:
            _GROUPS[parameter] = title
        return made

    return add


def _options_at(command: Any) -> list[click.Parameter]:
    """What decorators have added to a function so far, before it becomes a command."""
    found: list[click.Parameter] = getattr(command, "__click_params__", [])
    return found


PATH = click.Path(path_type=Path)


class Declared(Ruled):
    """An option of a command that stands in an option dataclass: default, help, limits and what it counts with are
    those of its field."""

    def __init__(self, *args: Any, options: type, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.options = options


def from_options(options: type, *flags: str, **settings: Any) -> Callable[[F], F]:
    """A click option for a field of an option dataclass, that of the longest flag, or of the last name where one has no
    dashes. `settings` come before what is declared there."""
    name = max(flags, key=lambda flag: (not flag.startswith("-"), len(flag))).strip("-").replace("-", "_")
    found: dict[str, Any] = {"show_default": True}
    if not settings.get("required"):  # else click takes None for a value that was given
        found["default"] = default_of(options, name)
    if (declared := options_of(options).get(name)) is not None:
        found |= {"help": declared.help, "counts": declared.counts, **_kind(get_type_hints(options)[name], declared)}
        if found.get("multiple") and "nargs" not in found:
            found["help"] = f"{declared.help} Repeats."
    return click.option(*flags, cls=Declared, options=options, **{**found, **settings})


def options_from(options: type, *flags: str) -> Callable[[F], F]:
    """Click options for several fields of an option dataclass, in the order of the flags."""
    return together(*(from_options(options, flag) for flag in flags))


def element_of(annotation: Any) -> Any:
    """The dataclass of a field that is a tuple of them, each given as several values: `--site SITE KEEP OF`."""
    first = get_args(annotation)[:1]
    return first[0] if first and is_dataclass(first[0]) else None


def _kind(annotation: Any, declared: Option) -> dict[str, Any]:
    """How click reads a field of a type, `T`, `T | None` or `tuple[T, ...]`, within its limits."""
    kinds = {annotation, *get_args(annotation)}
    if (element := element_of(annotation)) is not None:
        hints = get_type_hints(element)
        made: dict[str, Any] = {"type": tuple(hints.values()), "nargs": len(hints), "multiple": True}
        made["callback"] = lambda context, parameter, values: tuple(element(*value) for value in values)
        return {**made, "metavar": " ".join(hints).upper()}
    # click's integers have no bounds that are left out, and ours have none.
    low: Any = declared.least if declared.above is None else declared.above
    high: Any = declared.most if declared.below is None else declared.below
    if declared.choices:
        return {"type": click.Choice(declared.choices)}
    if declared.commas:
        help = f"{declared.help.removesuffix('.')}, comma-separated."
        return {"default": "", "show_default": False, "callback": _names, "help": help}
    if bool in kinds:
        return {"is_flag": True}
    if int in kinds:
        return {"type": click.IntRange(low, high)}
    if float in kinds:
        return {"type": click.FloatRange(low, high, declared.above is not None, declared.below is not None)}
    return {"type": PATH if Path in kinds else str, "multiple": tuple in {getattr(annotation, "__origin__", None)}}


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


def taken(asked: dict[str, Any], options: type, but: Collection[str] = ()) -> dict[str, Any]:
    """The values of the fields of an option dataclass, taken out of `asked`; those of the fields `but` stay there."""
    names = [field.name for field in fields(options) if field.name in asked and field.name not in but]
    return {name: asked.pop(name) for name in names}


OUTPUT = "Output"
"""The heading that these options have in the help."""


def _writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Refuse a file for the result that cannot be written before there is one."""
    from sparsepack.files.atomic import check_output

    if path and path != "-":
        check_output(Path(path), overwrite=True)
    return path


overwrite_flag = group(OUTPUT, click.option("--overwrite", is_flag=True, help="Replace an output that exists."))
json_output = group(
    OUTPUT,
    click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=_writable,
        help="Write the result as JSON, as flat records (a line each, for pandas) where FILE ends in .jsonl; - for "
        "standard output.",
    ),
)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for standard output, with escapes where its encoding cannot print a character or a terminal would obey
    one."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    obeyed = is_terminal(sys.stdout) and printable(text) != text
    return json.dumps(value, indent=indent) if obeyed else text


def print_json(value: Any) -> None:
    """JSON on standard output."""
    tell(json_text(value, indent=2))


def emit(result: Any, json_path: str | None, table: Callable[[Any], str]) -> None:
    """Print a result as a table, and write it as JSON to a file; for `-` print JSON alone."""
    from sparsepack.files.records import write_result

    if json_path == "-":
        print_json(result)
        return
    tell(printable(table(result)))
    if json_path:
        write_result(Path(json_path), result)

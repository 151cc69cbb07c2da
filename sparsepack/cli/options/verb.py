"""What every verb is: its options stand in groups in the help, and one that does nothing beside the others is refused.

Only click is imported here.
"""

import errno
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from sparsepack.errors import UserError
from sparsepack.option import Condition, idle, is_missing_path
from sparsepack.workers.environment import several

F = TypeVar("F", bound=Callable[..., Any])
EFFECTIVE = "sparsepack.effective"
"""Under this name it has the names of the options that have an effect beside the others that were given."""
MODELS, TEXTS = ("model", "subject", "against", "teacher"), ("texts", "text", "perplexity")
"""The parameters that name a model or an artifact, and texts: paths, or names on the hub."""
OUTPUTS = ("output", "json_path", "plot_path")
"""The parameters that name what a verb writes; all others may name what it reads."""
ARGUMENTS = "sparsepack.arguments"
"""Under this name click's context has the arguments of the whole command line."""

_GROUPS: dict[click.Parameter, str] = {}
"""The heading under which the help shows an option, where that is another than "Options"."""


class Existing(click.Path):
    """A path of what a verb reads: where there is nothing, that is said before anything is imported.

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


class Verb(click.Command):
    """A command of sparsepack."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Raises `UserError` before that where an option was given that does nothing, and for one of several
        workers where the verb takes none."""
        if several() and "devices" not in {str(each.name) for each in self.params}:
            raise UserError(f"{self.name} runs in one process; start it without torchrun, or unset WORLD_SIZE")
        options = {str(each.name): each for each in self.params if isinstance(each, click.Option)}
        given = [name for name in options if was_given(ctx, name)]

        def counts(name: str) -> tuple[Condition, ...]:
            option = options[name]
            return option.counts if isinstance(option, Ruled) else ()

        def flag(name: str) -> str:
            return max(options[name].opts, key=len) if name in options else name.replace("_", "-")

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
        expected = "a model's folder, a .gguf file, or the name of a model on the hub"
        of_text = "a .txt or .jsonl file (also .xz, .gz), shipped:train, or the name of a data set on the hub"
        kinds = ((MODELS, (".gguf",), expected), (TEXTS, (".txt", ".jsonl", ".xz", ".gz"), of_text))
        for names, suffixes, what in kinds:
            for value in (values.get(name) for name in names):
                for each in value if isinstance(value, tuple) else (value,):
                    if isinstance(each, str) and is_missing_path(each, *suffixes):
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
        """The options of each group under its heading; the ones that every verb has come last."""
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


verb = functools.partial(click.command, cls=Verb)
"""`click.command` for a verb."""


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

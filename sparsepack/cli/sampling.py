"""How `generate` has tokens chosen: as the user says, and else as the model's makers suggest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from sparsepack.cli.options.verb import was_given
from sparsepack.errors import UserError
from sparsepack.option import idle, options_of
from sparsepack.progress import say
from sparsepack.runtime.options import GenerateOptions


def chosen(called: click.Context, options: GenerateOptions, suggested: Mapping[str, Any]) -> GenerateOptions:
    """The options, with the model's suggestions for what nobody gave; standard error says what was taken.

    suggested -- `PackedModel.generation`

    Where the user asks for the likeliest token, nothing is suggested of how tokens are drawn. Raises `UserError` for an
    option that was given and does nothing.
    """
    declared = options_of(GenerateOptions)
    taken: dict[str, Any] = {name: value for name, value in suggested.items() if not was_given(called, name)}
    likeliest = options.temperature == 0 and "temperature" not in taken
    if likeliest:
        drawn = {name for name in taken if any(each.field == "temperature" for each in declared[name].counts)}
        taken = {name: value for name, value in taken.items() if name not in drawn}
    options = replace(options, **taken)
    given = [name for name in declared if was_given(called, name)]
    for line in idle(given, lambda name: getattr(options, name), lambda name: declared[name].counts, _flag):
        raise UserError(line)
    if taken:
        shown = ", ".join(f"{_flag(name)} {value:g}" for name, value in taken.items())
        say(f"the model's makers suggest {shown}; --temperature 0 takes the likeliest token each time")
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

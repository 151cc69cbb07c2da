"""Options of verbs that stand in option dataclasses: default, help and limits are written there once.

Nothing heavy is imported at the top.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from sparsepack.cli.options.verb import F, Ruled, together
from sparsepack.option import Option, default_of, options_of

PATH = click.Path(path_type=Path)


class Declared(Ruled):
    """An option of a verb that stands in an option dataclass: default, help, limits and what it counts with are those
    of its field."""

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
        if found.get("multiple") and "multiple" not in settings:
            found["help"] = f"{declared.help} Repeats."
    return click.option(*flags, cls=Declared, options=options, **{**found, **settings})


def options_from(options: type, *flags: str) -> Callable[[F], F]:
    """Click options for several fields of an option dataclass, in the order of the flags."""
    return together(*(from_options(options, flag) for flag in flags))


def _kind(annotation: Any, declared: Option) -> dict[str, Any]:
    """How click reads a field of a type, `T`, `T | None` or `tuple[T, ...]`, within its limits."""
    kinds = {annotation, *get_args(annotation)}
    # click's integers have no bounds that are left out, and ours have none.
    low: Any = declared.least if declared.above is None else declared.above
    high: Any = declared.most if declared.below is None else declared.below
    if declared.choices:
        return {"type": click.Choice(declared.choices)}
    if bool in kinds:
        return {"is_flag": True}
    if int in kinds:
        return {"type": click.IntRange(low, high)}
    if float in kinds:
        return {"type": click.FloatRange(low, high, declared.above is not None, declared.below is not None)}
    return {"type": PATH if Path in kinds else str, "multiple": tuple in {getattr(annotation, "__origin__", None)}}


def taken(asked: dict[str, Any], options: type, but: Collection[str] = ()) -> dict[str, Any]:
    """The values of the fields of an option dataclass, taken out of `asked`; those of the fields `but` stay there."""
    names = [field.name for field in fields(options) if field.name in asked and field.name not in but]
    return {name: asked.pop(name) for name in names}

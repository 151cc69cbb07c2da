"""Options that several scripts have, as one value."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def asked_as(
    kind: Callable[..., T], options: Iterable[Callable[[Callable[..., None]], Callable[..., None]]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command these options, in this order: its first argument is a `kind` of their values, a
    dataclass whose fields they are. Options of the command's own come after it, by their names."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name not in names}
            command(kind(**{name: given[name] for name in names}), **own)

        made: Callable[..., None] = run
        for option in reversed([*options]):
            made = option(made)
        return made

    return with_options

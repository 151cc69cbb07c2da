"""What the user may ask for, declared once: default, meaning and limits stand in the option dataclass of a function.

The command line (`cli.options.from_options`), recipes (`recipe.section`) and the page docs/recipe.md take them from
there. An option dataclass needs neither click nor pydantic.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KEY = "option"
LARGEST_SEED = 2**32 - 1
LARGEST_COUNT = 2**31 - 1
"""Kernels count in 32 bits."""


@dataclass(frozen=True)
class Option:
    """What is declared of a field beside its type and default.

    help    -- a sentence for people, the same on the command line and in the reference of recipes
    choices -- the names that it may have; none: any
    least, most, above, below -- limits of a number, the last two left out themselves
    everywhere -- whether each verb, and each section of a recipe, that is told any of these options takes this one,
                  too, without naming it
    """

    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    everywhere: bool = False

    def problem(self, value: Any) -> str | None:
        """What was expected of a value instead; None where it may stand. None as a value is "not given"."""
        if value is None:
            return None
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        bounds = (
            ("at least", self.least, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.most, operator.le),
            ("below", self.below, operator.lt),
        )
        given = [(f"{word} {bound:g}", fits(value, bound)) for word, bound, fits in bounds if bound is not None]
        return None if all(fits for _, fits in given) else " and ".join(text for text, _ in given)


def option(help: str, *, default: Any = MISSING, **limits: Any) -> Any:
    """A field of an option dataclass: what `dataclasses.field` gives, with an `Option` inside."""
    return field(default=default, metadata={_KEY: Option(help, **limits)})


def options_of(options: type) -> Mapping[str, Option]:
    """The declared options of a dataclass, by field."""
    return {each.name: each.metadata[_KEY] for each in fields(options) if _KEY in each.metadata}


def default_of(options: type, name: str) -> Any:
    """The default of a field; None where it has to be given."""
    (found,) = (each.default for each in fields(options) if each.name == name)
    return None if found is MISSING else found


def check_options(asked: Any, error: type[Exception], but: Collection[str] = ()) -> None:
    """Raise `error`, naming field, value and what was expected, for the first value that its option does not allow.

    but -- fields that are not looked at
    """
    for name, declared in options_of(type(asked)).items():
        if name in but:
            continue
        value = getattr(asked, name)
        if (expected := declared.problem(value)) is not None:
            raise error(f"{name} {value!r}: expected {expected}")

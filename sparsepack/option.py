"""What the user may ask for, declared once: default, meaning and limits stand in the option dataclass of a function.

The command line (`cli.options.from_options`), recipes (`recipe.section`) and the page docs/recipe.md take them from
there. An option dataclass needs neither click nor pydantic.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Asked = TypeVar("Asked", bound=Any)
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


def check_type(name: str, value: Any, annotation: Any, error: type[Exception]) -> None:
    """Raise `error`, naming the value and what was expected, where a value is not what `annotation` says.

    A whole number may stand for any number, a text for a path, and a list for a tuple. Annotations of other kinds than
    classes, unions and tuples are not looked at.
    """
    if not _is_of(value, annotation):
        raise error(f"{name} {str(value)[:80]!r}: expected {_in_words(annotation)}, not {type(value).__name__}")


def _is_of(value: Any, annotation: Any) -> bool:
    kinds = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return any(_is_of(value, kind) for kind in kinds)
    if get_origin(annotation) is tuple and len(kinds) == 2 and kinds[1] is Ellipsis:
        return isinstance(value, tuple | list) and all(_is_of(each, kinds[0]) for each in value)
    if annotation in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (annotation is float and isinstance(value, float))
    if annotation is Path:
        return isinstance(value, str | Path)
    return not isinstance(annotation, type) or isinstance(value, annotation)


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", Path: "a path"}


def _in_words(annotation: Any) -> str:
    kinds = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_in_words(kind) for kind in kinds if kind is not type(None))
    if get_origin(annotation) is tuple:
        return f"a tuple, each of it {_in_words(kinds[0])}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def check_types(asked: Any, error: type[Exception]) -> None:
    """Raise `error` for the first field of a dataclass whose value is of another type than the field's."""
    for name, annotation in get_type_hints(type(asked)).items():
        check_type(name, getattr(asked, name), annotation, error)


def with_paths(asked: Asked) -> Asked:
    """A dataclass with a `Path` wherever a text stands for one."""
    hints = get_type_hints(type(asked))
    texts = {
        name: Path(value)
        for name, annotation in hints.items()
        if isinstance(value := getattr(asked, name), str) and Path in {annotation, *get_args(annotation)}
    }
    return replace(asked, **texts)


def check_options(asked: Any, error: type[Exception], but: Collection[str] = ()) -> None:
    """Raise `error`, naming field, value and what was expected, for the first value of another type than its field's,
    or that its option does not allow.

    but -- fields of which only the type is looked at
    """
    check_types(asked, error)
    for name, declared in options_of(type(asked)).items():
        if name in but:
            continue
        value = getattr(asked, name)
        if (expected := declared.problem(value)) is not None:
            raise error(f"{name} {value!r}: expected {expected}")

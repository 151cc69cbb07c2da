"""What the user may ask for, declared once: default, meaning and limits stand in the option dataclass of a function.

The command line (`cli.command.from_options`), recipes (`recipe.section`) and the page docs/recipe.md take them from
there. An option dataclass needs neither click nor pydantic.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Options = TypeVar("Options", bound=Any)
_KEY = "option"
LARGEST_SEED = 2**32 - 1
LARGEST_COUNT = 2**31 - 1
"""Kernels count in 32 bits."""


@dataclass(frozen=True)
class Condition:
    """What another field must be for an option to count; where it is not, an option that is given is refused.

    field  -- the other field, of the same dataclass or the same verb
    values -- those with which the option counts; none: all but those of `but`
    but    -- those with which the option does nothing
    given  -- whether the other field must have been given, or must not have been; None: its value decides
    others -- conditions each of which will do as well
    takes  -- whether on the command line the other field becomes the first of `values` where nobody gave it
    """

    field: str
    values: tuple[Any, ...] = ()
    but: tuple[Any, ...] = ()
    given: bool | None = None
    others: tuple["Condition", ...] = ()
    takes: bool = False

    def met(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the option counts beside the values of all fields."""
        return self.holds(value_of(self.field)) or any(other.met(value_of) for other in self.others)

    def holds(self, other: Any) -> bool:
        """Whether the option counts with this value of the other field, by this condition alone."""
        if self.given is not None:
            return self.given != _missing(other)
        return other in self.values if self.values else other not in self.but

    def refusal(self, value: Any, other: Any, spelt: Callable[[str], str], name: str) -> str:
        """The line that refuses `value` of the field `name`; `spelt` writes a field as the user knows it."""
        given, field = _given(spelt(name), value), spelt(self.field)
        names = " or ".join(map(str, self.values))
        if _missing(other):
            return f"{given}: it does nothing without {f'{field} {names}'.strip()}; give both, or neither"
        if names:
            return f"{given}: it is for {field} {names}, not {other}; leave it out, or take {field} {self.values[0]}"
        return f"{given}: it does nothing with {_given(field, other)}; leave one of them out"


def _missing(value: Any) -> bool:
    """Whether a value says that nobody gave one; zero is one."""
    return value is None or value is False or value in ((), "")


def _given(name: str, value: Any) -> str:
    """A field and its value, as in "--keep 4"; a flag is its name."""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return name if value is True else f"{name} {value if not isinstance(value, str) else value or repr(value)}"


def only_with(field: str, *values: Any, others: tuple[Condition, ...] = (), takes: bool = False) -> Condition:
    """An option counts where another field has one of these values, or without any where it is given; and where one of
    `others` holds."""
    return Condition(field, values=values, given=None if values else True, others=others, takes=takes)


def not_with(field: str, *values: Any) -> Condition:
    """An option does nothing where another field has one of these values; without any, where it is given."""
    return Condition(field, but=values, given=None if values else False)


@dataclass(frozen=True)
class Option:
    """What is declared of a field beside its type and default.

    help    -- a sentence for people, the same on the command line and in the reference of recipes
    choices -- the names that it may have; none: any
    least, most, above, below -- limits of a number, the last two left out themselves
    counts  -- what other fields must be for it to count, each of these; given elsewhere it is refused
    commas  -- whether it is several names, given as one text with commas between them
    everywhere -- whether each verb, and each section of a recipe, that is told any of these options takes this one,
                  too, without naming it
    """

    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    counts: tuple[Condition, ...] = ()
    commas: bool = False
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


def idle(
    given: Iterable[str],
    value_of: Callable[[str], Any],
    counts_of: Callable[[str], Collection[Condition]],
    spelt: Callable[[str], str] = str,
) -> Iterator[str]:
    """A line for each field that was given and does nothing beside the others.

    given     -- the fields that somebody gave a value
    value_of  -- the value of any field, its default where nobody gave one
    counts_of -- the conditions of a field
    spelt     -- writes a field as the user knows it
    """
    for name in given:
        for condition in counts_of(name):
            if not condition.met(value_of):
                yield condition.refusal(value_of(name), value_of(condition.field), spelt, name)
                break


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


def check_types(options: Any, error: type[Exception]) -> None:
    """Raise `error` for the first field of a dataclass whose value is of another type than the field's."""
    for name, annotation in get_type_hints(type(options)).items():
        check_type(name, getattr(options, name), annotation, error)


def with_paths(options: Options) -> Options:
    """A dataclass with a `Path` wherever a text stands for one."""
    hints = get_type_hints(type(options))
    texts = {
        name: Path(value)
        for name, annotation in hints.items()
        if isinstance(value := getattr(options, name), str) and Path in {annotation, *get_args(annotation)}
    }
    return replace(options, **texts)


def check_options(options: Any, error: type[Exception], but: Collection[str] = ()) -> None:
    """Raise `error`, naming field, value and what was expected, for the first value of another type than its field's,
    or that its option does not allow; then for the first that differs from its default and does nothing beside the
    others.

    but -- fields of which only the type is looked at
    """
    check_types(options, error)
    declared_of = options_of(type(options))
    for name, declared in declared_of.items():
        if name in but:
            continue
        value = getattr(options, name)
        if (expected := declared.problem(value)) is not None:
            raise error(f"{name} {value!r}: expected {expected}")
    changed = [name for name in declared_of if getattr(options, name) != default_of(type(options), name)]
    for line in idle(changed, lambda name: getattr(options, name, None), lambda name: declared_of[name].counts):
        raise error(line)


def with_values(
    options: Options, given: Mapping[str, Any], error: type[Exception], others: Mapping[str, str] = {}
) -> Options:
    """A dataclass with other values.

    given  -- by the names of fields, or by others
    others -- further names -> the field that each stands for

    Raises `error` for a name that is neither, with the nearest one, and for two names of one field.
    """
    names, values = [each.name for each in fields(options)], dict[str, tuple[str, Any]]()
    for name, value in given.items():
        field = others.get(name, name)
        if field not in names:
            near = get_close_matches(name, [*names, *others], 1)
            remedy = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
            raise error(f"{name}: no such option; {remedy}")
        if field in values:
            raise error(f"{name}: {values[field][0]} says the same; leave one of them out")
        values[field] = name, value
    return replace(options, **{field: value for field, (_, value) in values.items()})


def is_missing_path(name: str, *suffixes: str) -> bool:
    """Return whether a name can only be that of a file or folder, and there is none: what may be another's name on the
    hub is not."""
    path = Path(name)
    return not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in suffixes)

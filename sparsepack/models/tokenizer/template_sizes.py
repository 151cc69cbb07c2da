"""How large the values of a stranger's template may become: measured when they are made, and beforehand where one step
could make them much larger."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import TemplateError

LARGEST = 1 << 24
"""No value of a template has more characters and items, all that is in it counted, and no number more bits."""
_PRODUCT = 1 << 28
"""What a step that multiplies may make before it is measured."""

_MULTIPLIES = ("expandtabs", "indent", "join", "replace", "tojson", "translate", "urlize", "wordwrap")
"""Filters, and methods of texts, whose result can be as large as what they are given times another argument."""
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([\d*]*)\.?([\d*]*)")
"""A field of a format for `%`, with its width and its precision; a star takes them from the values."""
_BRACES = re.compile(r"\{[^{}]*\{?")
"""A field of a format for `str.format`; one within it takes the width from the values."""


class TooMuch(TemplateError):
    """A template took too long, or made too large a value."""


def sized(value: Any) -> Any:
    """The value. Raises `TooMuch` where it is larger than `LARGEST`."""
    if size(value) > LARGEST:
        raise TooMuch(f"it makes a value of more than {LARGEST:,} characters or items")
    return value


def size(value: Any) -> int:
    """The characters of a text; the items of a list, a tuple or a dictionary with all that is in them, as often as it
    stands there. Raises `TooMuch` for lists in lists without end."""
    try:
        return _size(value, {})
    except RecursionError as error:
        raise TooMuch("it makes lists within lists too deep (recursion)") from error


def _size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return 0
    if id(value) not in known:
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = len(inside) + sum(_size(each, known) for each in inside)
    return known[id(value)]


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text. Raises `TooMuch` where it is larger than `LARGEST`."""
    return "".join(counted(pieces))


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """The values one by one. Raises `TooMuch` where they are larger together than `LARGEST`."""
    total = 0
    for value in values:
        total += size(value)
        if total > LARGEST:
            raise TooMuch(f"it makes a text or a list of more than {LARGEST:,} characters or items")
        yield value


def check_power(base: Any, exponent: Any) -> None:
    """Raise `TooMuch` where base ** exponent is too large a number."""
    bits = base.bit_length() if isinstance(base, int) else 0
    if bits * abs(exponent if isinstance(exponent, int) else 1) > LARGEST:
        raise TooMuch("it raises a number to a power that is too large")


def check_product(one: Any, other: Any) -> None:
    """Raise `TooMuch` where one * other is too large a text or list."""
    for repeated, times in ((one, other), (other, one)):
        if size(repeated) * abs(times if isinstance(times, int) else 1) > LARGEST:
            raise TooMuch("it makes too large a product")


def check_call(name: str, given: Collection[Any], settings: Mapping[str, Any]) -> None:
    """Raise `TooMuch` where a filter or a method may make a huge value at once.

    given    -- what it works on, and its arguments
    settings -- its arguments with names
    """
    for value in (*given, *settings.values()):
        if isinstance(value, int) and abs(value) > LARGEST:
            raise TooMuch(f"it calls something with the number {str(value)[:20]}")
    first, *others = (*given, *settings.values()) or (None,)
    if name in _MULTIPLIES and size(first) * max((_times(each) for each in others), default=1) > _PRODUCT:
        raise TooMuch("it makes too large a text")


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else size(value)


def check_percent(text: Any) -> None:
    """Raise `TooMuch` for a format for `%` with widths that make a huge text, or that stand among the values."""
    if isinstance(text, str):
        _check_widths(width for field in _PERCENT.findall(text) for width in field)


def check_braces(text: Any) -> None:
    """The same of a format for `str.format`."""
    if isinstance(text, str):
        fields = _BRACES.findall(text.replace("{{", "").replace("}}", ""))
        _check_widths(width for field in fields for width in re.findall(r"\d+|(?<=.)\{", field))


def _check_widths(widths: Iterable[str]) -> None:
    total = 0
    for width in filter(None, widths):
        if not width.isdecimal():
            raise TooMuch("it takes the width of a text from the values")
        total += int(width[:9])
        if total > LARGEST:
            raise TooMuch("it makes too wide a text")

"""JSON schemas that texts keep to: what llguidance would not keep to is refused, and objects are closed."""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from sparsepack.option import LARGEST_COUNT
from sparsepack.serve.refusals import Refusal

LARGEST_DIVISOR = 10_000
"""The numbers that `multipleOf` names in a schema have at most this least common multiple, powers of ten left out.
llguidance makes a state for each remainder, without a limit of its own: 999,983 takes seconds, and ten times that
minutes."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose value has a schema for each of some names, which are no keywords."""

DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema whose value is no schema."""

COMBINING = frozenset(("allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties"))
ALTERNATIVES = frozenset(("$ref", "anyOf", "oneOf"))
"""Keywords of schemas that combine several; the second ones do together with `properties`."""
SAYING = frozenset(("additionalProperties", "patternProperties", "minProperties"))
"""Keywords of a schema that says of itself whether an object has other properties than those it names."""


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raise `Refusal` where llguidance would round a number of a schema, ignore it, or take all time for it."""
    if "x-guidance" in schema:
        raise refused("x-guidance is this server's own", param)
    divisor = 1
    for part in _schemas(schema):
        for name in BOUNDS:
            _check_bound(name, part.get(name, 0), param)
        for name in COUNTS:
            if isinstance(count := part.get(name), int) and count > LARGEST_COUNT:
                raise refused(f"{name} of more than {LARGEST_COUNT:,}", param)
        values = (value for name in ("const", "enum") for value in _values(part.get(name)))
        if any(isinstance(value, int) and not -(2**63) <= value < 2**64 for value in values):
            raise refused("const or enum with an integer beyond 64 bits", param)
        if isinstance(reference := part.get("$ref"), str) and not _names_schema(reference):
            raise refused(f"$ref {reference[:60]!r} names no schema", param)
        divisor = math.lcm(divisor, _figures(part.get("multipleOf")))
        if divisor > LARGEST_DIVISOR:
            raise refused(f"multipleOf of more than {LARGEST_DIVISOR:,}, alone or together", param)


def _check_bound(name: str, bound: Any, param: str) -> None:
    """Raise `Refusal` for a bound that llguidance clamps or rounds: it counts in 64 bits, and reads doubles."""
    if isinstance(bound, bool) and name.startswith("exclusive"):
        return  # as in draft 4 of JSON schema
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise refused(f"{name} is no number", param)
    if not -(2**63) <= bound < 2**63 or int(float(bound)) != int(bound):
        raise refused(f"{name} {str(Decimal(bound))[:30]}: a number beyond 64 bits, or that no double is", param)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it, wherever a reference may find one."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, Mapping):
            yield part
            for name, value in part.items():
                if name in NAMED and isinstance(value, Mapping):
                    parts += value.values()
                elif name not in DATA:
                    parts.append(value)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose objects have the properties that it names and no others, where it does not say whether they may:
    small models would otherwise write more of them without end. It stays as it is where parts are combined, since an
    object of one part may need the properties of another."""
    parts = list(_schemas(schema))
    if any(part.keys() & COMBINING or ("properties" in part and part.keys() & ALTERNATIVES) for part in parts):
        return schema
    return dict(_closed(schema))


def _closed(part: Any, names: bool = False) -> Any:
    """A part of a schema with its objects closed; of `names`, each value is a part."""
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    written = {
        name: value if name in DATA and not names else _closed(value, names=name in NAMED and not names)
        for name, value in part.items()
    }
    properties = part.get("properties")
    if names or not isinstance(properties, Mapping) or part.keys() & SAYING:
        return written
    names_all = {*(part.get("required") or ())} <= properties.keys()
    return {**written, "additionalProperties": False} if names_all else written


def _names_schema(reference: str) -> bool:
    """Whether a reference leads to what `_schemas` yields: not into data, and not to several schemas with names."""
    named = False
    for name in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not named and name in DATA:
            return False
        named = not named and name in NAMED
    return not named


def _values(data: Any) -> Iterator[Any]:
    """The numbers and texts in a value."""
    parts = [data]
    while parts:
        part = parts.pop()
        if isinstance(part, list | Mapping):
            parts += part.values() if isinstance(part, Mapping) else part
        else:
            yield part


def _figures(number: Any) -> int:
    """A number without its sign, its point and the zeros at its ends: 25 of -0.0250; 1 of what is no number or 0."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1
    exact = Decimal(repr(number) if isinstance(number, float) else number)
    return int("".join(map(str, exact.normalize().as_tuple().digits))) or 1 if exact.is_finite() else 1


def refused(reason: str, param: str) -> Refusal:
    return Refusal(400, f"{param}: it cannot be kept to ({one_line(reason)}); give another", param, "invalid_value")


def one_line(reason: str) -> str:
    """A reason in one line of bounded length, without llguidance's account of its state."""
    return " ".join(reason.partition("<state>")[0].split())[:300]

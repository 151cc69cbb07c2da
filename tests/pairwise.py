"""Fewer cases than the product of parameters."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise_cases(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which any two values of two parameters meet, the same ones each time; few, if not the fewest."""
    places = [[(parameter, n) for n in range(len(each))] for parameter, each in enumerate(values)]
    missing = {(a, b) for first, second in combinations(places, 2) for a in first for b in second}
    cases = []
    while missing:
        case = dict(min(missing))
        for parameter, choices in enumerate(places):
            if parameter not in case:
                met = [sum(tuple(sorted((other, here))) in missing for other in case.items()) for here in choices]
                case[parameter] = met.index(max(met))
        missing -= set(combinations(sorted(case.items()), 2))
        cases.append(tuple(each[case[n]] for n, each in enumerate(values)))
    return cases


def _parametrize(parameters: Mapping[str, Collection[Any]], cases: Iterable[tuple[Any, ...]], long: int) -> Any:
    """Parametrize a test; from case number `long` on they are long ones."""
    made = []
    for n, case in enumerate(cases):
        values = (each if "," in names else (each,) for names, each in zip(parameters, case, strict=True))
        made.append(pytest.param(*(value for each in values for value in each), marks=[pytest.mark.long][: n >= long]))
    return pytest.mark.parametrize(", ".join(parameters), made)


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by `pairwise_cases` of values by name; several names, "a, b", have tuples of values."""
    cases = pairwise_cases(*parameters.values())
    return _parametrize(parameters, cases, len(cases))


def each_value(parameters: Mapping[str, Collection[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by few cases that have each value; the rest of `pairwise` is `long`."""
    lengths = [len(values) for values in parameters.values()]
    few = [tuple(n % length for length in lengths) for n in range(max(lengths))]
    others = [case for case in pairwise_cases(*map(range, lengths)) if case not in few]
    cases = [tuple(map(list.__getitem__, map(list, parameters.values()), case)) for case in few + others]
    return _parametrize(parameters, cases, len(few))

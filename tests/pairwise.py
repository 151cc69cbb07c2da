"""Fewer cases than the product of parameters."""

from collections.abc import Mapping, Sequence
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


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by `pairwise_cases` of values by name; several names, "a, b", have tuples of values."""
    several = ["," in names for names in parameters]
    cases = [
        tuple(value for each, many in zip(case, several, strict=True) for value in (each if many else (each,)))
        for case in pairwise_cases(*parameters.values())
    ]
    return pytest.mark.parametrize(", ".join(parameters), cases)

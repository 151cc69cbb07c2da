"""Limits on what was measured: each bound of a gate is one verdict, on the worst of the rows it applies to.

Which gates there are and what they look at is each stage's own matter.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from sparsepack.publish.page import readable
from sparsepack.recipe.section import Limit


@dataclass(frozen=True)
class Verdict:
    """One bound of one gate. `measured` is None where the evaluation gave no number: then the gate fails."""

    gate: str
    measured: float | None
    limit: str
    where: str
    passed: bool


@dataclass(frozen=True)
class Value:
    """What a gate looks at: a measured value, and where it was."""

    where: str
    value: float | None


def judged(name: str, limit: Limit | None, values: Iterable[Value]) -> Iterator[Verdict]:
    """A verdict per bound, on the value that is worst for it; one without a number is the worst there is."""
    if limit is None:
        return
    measured = list(values)
    for bound, sign in ((limit.min, -1.0), (limit.max, 1.0)):
        if bound is None:
            continue
        worst = max(measured, key=partial(_badness, sign))
        passed = _badness(sign, worst) <= sign * bound
        allowed = f"{'at most' if sign > 0 else 'at least'} {readable(bound)}"
        yield Verdict(name, worst.value, allowed, worst.where, passed)


def _badness(sign: float, row: Value) -> float:
    return math.inf if row.value is None or math.isnan(row.value) else sign * row.value

"""Limits on what was measured: each bound of a gate is one verdict, on the worst of the rows it applies to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparsepack.errors import RecipeError
from sparsepack.recipe.schema import FILE_GATES, ROW_GATES, Gates, Limit


@dataclass(frozen=True)
class Verdict:
    """One bound of one gate. `measured` is None where the evaluation gave no number: then the gate fails."""

    gate: str
    measured: float | None
    limit: str
    where: str
    passed: bool


@dataclass(frozen=True)
class _Value:
    where: str
    value: float | None


def readable(value: float) -> str:
    """A measured value or a limit as text: sizes in full, all else to six digits."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"


def judge(gates: Gates | None, results: Mapping[str, Any]) -> list[Verdict]:
    """Every gate's verdict on `results` (the report's pack, evaluations and verify parts).

    A verification that failed is a verdict whether or not a gate asks for it. Raises `RecipeError` for a gate on a
    task's metric that does not exist.
    """
    verdicts = []
    if results.get("verify") is not None:
        verdicts.append(_verified(results["verify"]))
    if gates is None:
        return verdicts
    for name in ROW_GATES:
        limit = getattr(gates, name)
        if limit is not None:
            verdicts += _judged(name, limit, list(_row_values(name, results["evaluations"])))
    for name in FILE_GATES:
        limit = getattr(gates, name)
        if limit is not None:
            verdicts += _judged(name, limit, [_Value("the file", _file_value(name, results["pack"]))])
    for task, metrics in gates.tasks.items():
        for metric, limit in metrics.items():
            values = list(_task_values(task, metric, results["evaluations"]))
            verdicts += _judged(f"tasks.{task}.{metric}", limit, values)
    return verdicts


def _verified(report: Mapping[str, Any]) -> Verdict:
    problems = len(report["problems"])
    return Verdict("verify", problems, "no problem", "the file", not problems)


def _judged(name: str, limit: Limit, values: Sequence[_Value]) -> Iterator[Verdict]:
    """A verdict per bound, on the row that is worst for it; a row without a number is the worst there is."""
    for bound, sign in ((limit.min, -1.0), (limit.max, 1.0)):
        if bound is None:
            continue
        worst = max(values, key=partial(_badness, sign))
        passed = _badness(sign, worst) <= sign * bound
        allowed = f"{'at most' if sign > 0 else 'at least'} {readable(bound)}"
        yield Verdict(name, worst.value, allowed, worst.where, passed)


def _badness(sign: float, row: _Value) -> float:
    return math.inf if row.value is None or math.isnan(row.value) else sign * row.value


def _row_values(name: str, evaluations: Sequence[Mapping[str, Any]]) -> Iterator[_Value]:
    for row in (row for evaluation in evaluations for row in evaluation["perplexity"]):
        where = f"{row['text']}, {row['protocol']}"
        if name == "realised_sparsity":
            if row["protocol"] != "dense":  # nothing is skipped there by definition
                yield _Value(where, row["realised_sparsity"]["of_sparse_sites"])
        else:
            value = row[name]
            yield _Value(where, value["value"] if isinstance(value, Mapping) else value)


def _file_value(name: str, description: Mapping[str, Any]) -> float:
    return float(description["bits_per_weight"]["file"] if name == "bits_per_weight" else description["file_bytes"])


def _task_values(task: str, metric: str, evaluations: Sequence[Mapping[str, Any]]) -> Iterator[_Value]:
    for evaluation in evaluations:
        found = evaluation["tasks"]
        measured = {**found["groups"], **found["tasks"]}
        if task not in measured:
            raise RecipeError(f"gates.tasks.{task}: not measured; there are {', '.join(measured)}")
        metrics = measured[task]["metrics"]
        if metric not in metrics:
            raise RecipeError(f"gates.tasks.{task}.{metric}: not measured; there are {', '.join(metrics)}")
        yield _Value(f"{task}, {evaluation['protocol']}", metrics[metric]["value"])

"""Gates: limits on what the stages measure, which ones the recipe measures, and whether they are kept."""

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pydantic import Field, model_validator

from sparsepack.errors import RecipeError
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.sections import (
    ActivationSparsity,
    Eval,
    Pack,
    Prune,
    evaluates_pruned,
    mlp_kind,
    protocols_of,
    skips_neurons,
    sparse,
)


class Limit(Section):
    """The values that pass: `min <= value <= max`; one of the two may be left out."""

    min: float | None = Field(None, description="The smallest value that passes.")
    max: float | None = Field(None, description="The largest value that passes.")

    @model_validator(mode="after")
    def _some_value_passes(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("expected min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: nothing could pass")
        return self


def _limit(meaning: str) -> Any:
    return Field(None, description=meaning)


class Gates(Section):
    """Limits on what was measured, each with `min`, `max` or both: `{max: 1.1}`. Each applies to every row that has the
    value, and the worst one is judged. A limit that is not kept, or a failed verification, ends `run` with exit status
    3."""

    bits_per_weight: Limit | None = _limit("Of the whole file.")
    file_bytes: Limit | None = _limit("Size of the file.")
    verify: bool = Field(default=False, description="The artifact must have been verified.")
    perplexity: Limit | None = _limit("How badly the text is predicted.")
    perplexity_ratio: Limit | None = _limit("Over the source model's perplexity of the same tokens.")
    kl_divergence: Limit | None = _limit("From the source model's predictions, in nats a token.")
    top_token_agreement: Limit | None = _limit("Share of tokens whose likeliest successor is the source model's.")
    bits_per_byte: Limit | None = _limit("How badly the text is predicted, whatever the tokenizer.")
    realised_sparsity: Limit | None = _limit(
        "Share of all block weights that a decoded token skips; rows of `dense` do not count."
    )
    realised_sparsity_of_sparse_sites: Limit | None = _limit(
        "The same of the weights of the sites that may be sparse, as the target is."
    )
    tasks: dict[str, dict[str, Limit]] = Field(default={}, description="Of lm-eval tasks: task, metric, limits.")
    pruning_perplexity_ratio: Limit | None = _limit(
        "Of the pruned model before it is packed, over the source model's perplexity."
    )


_OF_FILE = ("bits_per_weight", "file_bytes")
_OF_ROW = ("perplexity", "perplexity_ratio", "kl_divergence", "top_token_agreement", "bits_per_byte")
_SPARSITIES = {"realised_sparsity": "overall", "realised_sparsity_of_sparse_sites": "of_sparse_sites"}


def unmeasured(recipe: Recipe, gates: Gates) -> Iterator[str]:
    """The gates on what the recipe does not measure, a sentence each."""
    section = Eval.find_in(recipe)
    texts = section.perplexity if section is not None else ()
    for name in _OF_FILE:
        if getattr(gates, name) is not None and Pack.find_in(recipe) is None:
            yield f"gates.{name}: there is no file; add a pack section"
    if gates.verify and not recipe.section("verify"):
        yield "gates.verify: the artifact is not verified; expected verify: true"
    for name in (*_OF_ROW, *_SPARSITIES):
        if getattr(gates, name) is not None and not texts:
            yield f"gates.{name}: it is not measured; add texts as eval.perplexity"
    for name in _SPARSITIES:
        if getattr(gates, name) is None:
            continue
        if mlp_kind(recipe).exact and not sparse(recipe) and not skips_neurons(recipe):
            yield f"gates.{name}: transformers computes inactive neurons, too; expected eval.backend cpu"
        elif not (sparse(recipe) or mlp_kind(recipe).exact) or set(protocols_of(recipe)) == {"dense"}:
            above = f"{ActivationSparsity.key}.sparsity above 0"
            yield f"gates.{name}: nothing runs sparse; expected {above}, and decode or all"
    for task in gates.tasks:
        if not any(fnmatch.fnmatch(task, pattern) for pattern in (section.tasks if section else ())):
            yield f"gates.tasks.{task}: it is not measured; add it to eval.tasks"
    if gates.pruning_perplexity_ratio is not None and not (section and evaluates_pruned(recipe, section)):
        what = "nothing is pruned; add a prune section"
        if not texts:
            what = "it is not measured; add texts as eval.perplexity"
        elif Prune.find_in(recipe) is not None:
            what = "nothing is done to the pruned model; perplexity_ratio is this, or add a pack section"
        yield f"gates.pruning_perplexity_ratio: {what}"


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


def judge(gates: Gates | None, report: Mapping[str, Any]) -> list[Verdict]:
    """A verdict on the report of a run for every bound of every gate; None for no gates.

    A verification that failed is a verdict whether or not a gate asks for it. Raises `RecipeError` for a gate on a
    task's metric that does not exist.
    """
    return list(_verdicts(gates or Gates(), report))


def _verdicts(gates: Gates, report: Mapping[str, Any]) -> Iterator[Verdict]:
    if (made := report["pack"]) is not None:
        found = {"bits_per_weight": made["bits_per_weight"]["file"], "file_bytes": float(made["file_bytes"])}
        for name in _OF_FILE:
            yield from _judged(name, getattr(gates, name), [Value("the file", found[name])])
    if report["verify"] is not None:
        problems = len(report["verify"]["problems"])
        yield Verdict("verify", problems, "no problem", "the file", not problems)
    evaluations = report["evaluations"]
    rows = [(f"{row['text']}, {row['protocol']}", row) for each in evaluations for row in each["perplexity"]]
    for name in _OF_ROW:
        yield from _judged(name, getattr(gates, name), (Value(where, _number(row[name])) for where, row in rows))
    # In dense rows nothing is skipped by definition.
    sparse_rows = [(where, row["realised_sparsity"]) for where, row in rows if row["protocol"] != "dense"]
    for name, key in _SPARSITIES.items():
        yield from _judged(name, getattr(gates, name), (Value(where, realised[key]) for where, realised in sparse_rows))
    for task, metrics in gates.tasks.items():
        for metric, bounds in metrics.items():
            yield from _judged(f"tasks.{task}.{metric}", bounds, _task_values(task, metric, evaluations))
    of_pruned = report["eval_pruned"]["perplexity"] if report["eval_pruned"] else []
    values = (Value(f"{row['text']}, pruned", row["perplexity_ratio"]["value"]) for row in of_pruned)
    yield from _judged("pruning_perplexity_ratio", gates.pruning_perplexity_ratio, values)


def _number(value: Any) -> float | None:
    found: float | None = value["value"] if isinstance(value, Mapping) else value
    return found


def _task_values(task: str, metric: str, evaluations: Iterable[Mapping[str, Any]]) -> Iterator[Value]:
    for evaluation in evaluations:
        found = evaluation["tasks"]
        measured = {**found["groups"], **found["tasks"]}
        if task not in measured:
            raise RecipeError(f"gates.tasks.{task}: not measured; there are {', '.join(measured)}")
        metrics = measured[task]["metrics"]
        if metric not in metrics:
            raise RecipeError(f"gates.tasks.{task}.{metric}: not measured; there are {', '.join(metrics)}")
        yield Value(f"{task}, {evaluation['protocol']}", metrics[metric]["value"])


def _judged(name: str, limit: Limit | None, values: Iterable[Value]) -> Iterator[Verdict]:
    """A verdict per bound, on the value that is worst for it; one without a number is the worst there is."""
    from sparsepack.publish.page import readable

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

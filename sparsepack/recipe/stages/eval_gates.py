"""The gates on what `eval` measures: on rows of perplexity, on sparsity, on tasks."""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from sparsepack.errors import RecipeError
from sparsepack.recipe.gates import Value, Verdict, judged
from sparsepack.recipe.section import Limit, Recipe, limit
from sparsepack.recipe.stages.eval_section import Eval, perplexity_texts, protocols_of, skips_neurons
from sparsepack.recipe.stages.pack import mlp_kind
from sparsepack.recipe.stages.thresholds import ActivationSparsity, sparse

_OF_A_ROW = {
    "perplexity": "How badly the text is predicted.",
    "perplexity_ratio": "Over the source model's perplexity of the same tokens.",
    "kl_divergence": "From the source model's predictions, in nats a token.",
    "top_token_agreement": "Share of tokens whose likeliest successor is the source model's.",
    "bits_per_byte": "How badly the text is predicted, whatever the tokenizer.",
}
_SPARSITIES = {
    "realised_sparsity": "Share of all block weights that a decoded token skips; rows of `dense` do not count.",
    "realised_sparsity_of_sparse_sites": "The same of the weights of the sites that may be sparse, as the target is.",
}
_KEYS = {"realised_sparsity": "overall", "realised_sparsity_of_sparse_sites": "of_sparse_sites"}


def unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    asked = Eval.asked_in(recipe)
    for name in (*_OF_A_ROW, *_SPARSITIES):
        if getattr(gates, name) is not None and not perplexity_texts(recipe):
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
        if not any(fnmatch.fnmatch(task, pattern) for pattern in (asked.tasks if asked else ())):
            yield f"gates.tasks.{task}: it is not measured; add it to eval.tasks"


def judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    evaluations = report["evaluations"]
    rows = [
        (f"{row['text']}, {row['protocol']}", row) for evaluation in evaluations for row in evaluation["perplexity"]
    ]
    for name in _OF_A_ROW:
        values = (Value(where, _number(row[name])) for where, row in rows)
        yield from judged(name, getattr(gates, name), values)
    # In dense rows nothing is skipped by definition.
    sparse_rows = [(where, row["realised_sparsity"]) for where, row in rows if row["protocol"] != "dense"]
    for name, key in _KEYS.items():
        yield from judged(name, getattr(gates, name), (Value(where, realised[key]) for where, realised in sparse_rows))
    for task, metrics in gates.tasks.items():
        for metric, bounds in metrics.items():
            yield from judged(f"tasks.{task}.{metric}", bounds, _task_values(task, metric, evaluations))


def _number(value: Any) -> float | None:
    found: float | None = value["value"] if isinstance(value, Mapping) else value
    return found


def _task_values(task: str, metric: str, evaluations: list[Mapping[str, Any]]) -> Iterator[Value]:
    for evaluation in evaluations:
        found = evaluation["tasks"]
        measured = {**found["groups"], **found["tasks"]}
        if task not in measured:
            raise RecipeError(f"gates.tasks.{task}: not measured; there are {', '.join(measured)}")
        metrics = measured[task]["metrics"]
        if metric not in metrics:
            raise RecipeError(f"gates.tasks.{task}.{metric}: not measured; there are {', '.join(metrics)}")
        yield Value(f"{task}, {evaluation['protocol']}", metrics[metric]["value"])


GATES: dict[str, tuple[Any, Any]] = {
    **{name: limit(meaning) for name, meaning in {**_OF_A_ROW, **_SPARSITIES}.items()},
    "tasks": (
        Annotated[dict[str, dict[str, Limit]], Field(description="Of lm-eval tasks: task, metric, limits.")],
        {},
    ),
}
"""The limits apply to every perplexity row (text and protocol), the worst of which is shown."""

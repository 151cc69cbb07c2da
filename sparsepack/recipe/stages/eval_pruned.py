"""`eval` of the pruned model before it is packed: what pruning costs, and what is added to that."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sparsepack.eval.options import EvalRequest
from sparsepack.eval.results import pruning_table
from sparsepack.files.atomic import write_json
from sparsepack.option import default_of
from sparsepack.recipe.section import Recipe, limit
from sparsepack.recipe.stage import Job, Stage, Value, Verdict, judged, leaves, read_json
from sparsepack.recipe.stages.eval import Eval, memory, request_of, second_half, tokens_of_one
from sparsepack.recipe.stages.pack import Pack
from sparsepack.recipe.stages.prune import pruned
from sparsepack.recipe.stages.thresholds import sparse
from sparsepack.tables import Table

RESULT, GATE = "eval_pruned.json", "pruning_perplexity_ratio"


def _wanted(recipe: Recipe, section: Eval) -> bool:
    """Whether something is done to the pruned model; else `eval` measures just that model."""
    return pruned(recipe) and bool(section.perplexity) and (Pack.find_in(recipe) is not None or sparse(recipe))


def _request(job: Job, section: Eval) -> EvalRequest:
    """The source model is computed in the type in which `eval` computes it."""
    request = request_of(job, section, "dense")
    names = ("tasks", "task_path", "trust_tasks", "limit", "num_fewshot", "apply_chat_template", "runtime")
    return replace(request, **{name: default_of(EvalRequest, name) for name in names})


def _settings(job: Job, section: Eval) -> dict[str, Any]:
    return {
        "dtype": _request(job, section).dtype,
        "context": section.context,
        "windows": section.windows,
        "batch": section.batch,
        "second_half": second_half(job.recipe),
        "texts_sha256": [job.text([name]).sha256 for name in section.perplexity],
    }


def _run(job: Job, section: Eval) -> None:
    from sparsepack.eval.run import evaluate

    evaluation = evaluate(_request(job, section), lambda name: job.text([name]))
    evaluation["subject"]["name"] = job.checkpoint.name  # without the work folder's path
    write_json(job.folder / RESULT, evaluation)


def _show(report: Mapping[str, Any]) -> Iterator[Table]:
    if report["eval_pruned"]:
        yield pruning_table(report["evaluations"], report["eval_pruned"])


def _unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    section = Eval.find_in(recipe)
    if getattr(gates, GATE) is None or (section is not None and _wanted(recipe, section)):
        return
    if section is None or not section.perplexity:
        yield f"gates.{GATE}: it is not measured; add texts as eval.perplexity"
    elif pruned(recipe):
        yield f"gates.{GATE}: nothing is done to the pruned model; perplexity_ratio is this, or add a pack section"
    else:
        yield f"gates.{GATE}: nothing is pruned; add a prune section"


def _judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = report["eval_pruned"]["perplexity"] if report["eval_pruned"] else []
    values = (Value(f"{row['text']}, pruned", row["perplexity_ratio"]["value"]) for row in rows)
    yield from judged(GATE, getattr(gates, GATE), values)


EVAL_PRUNED = Stage(
    name="eval_pruned",
    key=Eval.key,
    type=Eval | None,
    outputs=leaves(RESULT),
    settings=_settings,
    run=_run,
    wanted=_wanted,
    tokens=tokens_of_one,
    memory=memory,
    result=("eval_pruned", read_json(RESULT), None),
    show=_show,
    gates={GATE: limit("Of the pruned model before it is packed, over the source model's perplexity.")},
    unmeasured=_unmeasured,
    judge=_judge,
)

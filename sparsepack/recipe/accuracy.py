"""The tables of what evaluations found, as a run shows them."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from sparsepack.eval.standard_error import with_error
from sparsepack.recipe.console import table
from sparsepack.runtime.hybrid.served import served_in_words


def accuracy_tables(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A table of all perplexity rows of a report, and one for the tasks of each evaluation."""
    rows = [row for evaluation in report["evaluations"] for row in evaluation["perplexity"]]
    if rows:
        yield _accuracy(rows)
        for row in rows:
            if row.get("served"):
                yield f"{escape(row['text'])}, {row['protocol']}: {served_in_words(row['served'])}"
    for evaluation in report["evaluations"]:
        if evaluation["tasks"]:
            yield _tasks(evaluation["tasks"])


def _accuracy(rows: list[Mapping[str, Any]]) -> Table:
    columns = ("text", "protocol", ">windows", ">perplexity", ">/ source", ">KL, nats", ">same top token")
    scored = ", ".join(sorted({row["scored"] for row in rows}))
    reads = any(row.get("tokens_read") for row in rows)
    made = table(
        f"accuracy against the source model, scored: {scored} of each window",
        *columns,
        ">skipped",
        ">of sparse sites (target)",
        *([">tokens read (target)"] if reads else []),
    )
    for row in rows:
        realised = row["realised_sparsity"]
        skips = row["protocol"] != "dense" and (realised["target"] or realised["overall"])
        target = f" ({100 * realised['target']:.1f} %)" if realised["target"] else ""
        made.add_row(
            escape(row["text"]),
            row["protocol"],
            f"{row['windows']} x {row['context']}",
            with_error(row["perplexity"], 2),
            with_error(row["perplexity_ratio"], 4),
            with_error(row["kl_divergence"], 4),
            f"{100 * row['top_token_agreement']['value']:.1f} %",
            f"{100 * realised['overall']:.1f} %" if skips else "nothing",
            f"{100 * realised['of_sparse_sites']:.1f} %{target}" if skips else "",
            *([_share_read(row.get("tokens_read"))] if reads else []),
        )
    return made


def _share_read(read: Mapping[str, Any] | None) -> str:
    """Of the tokens that sparse layers see."""
    return f"{100 * read['of_sparse_layers']:.1f} % ({100 * read['target']:.1f} %)" if read else "all"


def _tasks(found: Mapping[str, Any]) -> Table:
    chat = ", in the chat template" if found["apply_chat_template"] else ""
    made = table(f"tasks, protocol {found['protocol']}{chat}", "task", ">samples", "metric", ">value")
    for name, task in found["tasks"].items():
        for metric, value in task["metrics"].items():
            made.add_row(escape(name), str(task["samples"]), escape(metric), with_error(value, 4))
    return made

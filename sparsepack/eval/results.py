"""Figures over windows with their standard errors, and the tables of an evaluation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.models.activity import bits_read, shown
from sparsepack.placement.traffic import describe_hits
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 1e9
"""Larger figures are shown by powers of ten: the perplexity of a broken model may have hundreds of digits."""


def mean(values: "Tensor") -> dict[str, float | None]:
    """The mean of one value per window, and its error; None of a single window."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
    return {"value": float(values.mean()), "stderr": error}


def exp_mean(values: "Tensor") -> dict[str, float | None]:
    """exp of the mean, and its error: exp(mean) * error of the mean; infinity, without one, beyond any number."""
    of = mean(values)
    try:
        value = math.exp(float(values.mean()))
    except OverflowError:
        return {"value": math.inf, "stderr": None}
    return {"value": value, "stderr": None if of["stderr"] is None else value * of["stderr"]}


def with_error(figure: Mapping[str, float | None], digits: int) -> str:
    """`15.430 ± 0.210`; without the error where a single window gives none, `-` where there is no number at all, and
    `1.2e+09` where it would take more than nine digits."""
    value, error = figure["value"], figure.get("stderr")
    if value is None:
        return "-"
    kind = "f" if abs(value) < _MOST else "e"
    return f"{value:.{digits}{kind}}" + ("" if error is None else f" ± {error:.{digits}{kind}}")


def accuracy_tables(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """A table of all texts and protocols, and one of all tasks; none of what was not measured.

    evaluations -- as `evaluate` returns them
    """
    if rows := [row for evaluation in evaluations for row in evaluation["perplexity"]]:
        yield _perplexity(rows)
    if tasks := [evaluation["tasks"] for evaluation in evaluations if evaluation["tasks"]]:
        yield _tasks(tasks)


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> Table:
    compared = any("kl_divergence" in row for row in rows)
    reads = any(row["tokens_read"] for row in rows)
    columns = ["text", "protocol", "windows", "perplexity", "bits/byte"]
    columns += ["/ source", "KL, nats", "same top token"] if compared else []
    planes = all(row["realised_sparsity"].get("bits") for row in rows)
    columns += ["of each weight"] if planes else ["skipped", "of sparse sites (target)"]
    columns += ["tokens read (target)"] if reads else []
    scored = ", ".join(sorted({row["scored"] for row in rows}))
    of_weights = "skipped: share of all block weights that a decoded token skips"
    if planes:
        of_weights = "of each weight: bits that a decoded token reads, the mean over all block weights"
    return Table(
        columns,
        [_perplexity_row(row, compared, planes, reads) for row in rows],
        notes=[
            f"scored: {scored} of each window; {of_weights}",
            *(
                f"{Path(row['text']).name}, {row['protocol']}: {describe_hits(row['served'])}"
                for row in rows
                if row["served"]
            ),
        ],
    )


def _perplexity_row(row: Mapping[str, Any], compared: bool, planes: bool, reads: bool) -> list[str]:
    cells = [
        Path(row["text"]).name,
        _protocol(row),
        f"{row['windows']} x {row['context']}",
        with_error(row["perplexity"], 3),
        f"{row['bits_per_byte']:.4f}",
    ]
    if compared:
        names = ("perplexity_ratio", "kl_divergence", "top_token_agreement")
        cells += [with_error(row[name], 4) if name in row else "-" for name in names]
    realised = row["realised_sparsity"]
    if planes:
        cells.append(skipped(realised, row["protocol"]))
    else:
        overall = "-" if realised["neurons_counted"] is False else f"{100 * realised['overall']:.1f} %"
        cells += [overall, _of_sparse_sites(realised)]
    return [*cells, share_read(row["tokens_read"])] if reads else cells


def _protocol(found: Mapping[str, Any]) -> str:
    """The protocol, and whether the share was held at the target."""
    return f"{found['protocol']}, held" if found.get("held") else str(found["protocol"])


def skipped(realised: Mapping[str, Any], protocol: str = "decode") -> str:
    """The share of the block weights that decoded tokens skipped; `-` where it was not counted; of weights with planes
    the bits that were read."""
    if bits := realised.get("bits"):
        target = realised["target_overall"] if realised["target"] and protocol != "dense" else None
        return bits_read(bits, realised["overall"], target)
    return "-" if realised["neurons_counted"] is False else shown(realised["overall"], realised["of_sparse_sites"])


def _of_sparse_sites(realised: Mapping[str, Any]) -> str:
    """The share of the sites that may be sparse, and the one asked for; neurons are skipped where they are zero."""
    if realised["neurons_counted"] is False:
        return "-"
    target = f" ({100 * realised['target']:.1f} %)" if realised["target"] else ""
    return f"{100 * realised['of_sparse_sites']:.1f} %{target}"


def share_read(read: Mapping[str, Any] | None) -> str:
    """The share of the cached tokens that sparse layers read, and the share that was asked for."""
    return f"{100 * read['of_sparse_layers']:.1f} % ({100 * read['target']:.1f} %)" if read else "all"


def _tasks(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [name, metric, with_error(value, 4), task["samples"], _protocol(of_protocol)]
        for of_protocol in found
        for name, task in of_protocol["tasks"].items()
        for metric, value in task["metrics"].items()
    ]
    chat = any(of_protocol["apply_chat_template"] for of_protocol in found)
    notes = ["documents of the tasks are in the model's chat template"] if chat else []
    return Table(["task", "metric", "value", "samples", "protocol"], rows, notes=notes)


def pruning_table(evaluations: Sequence[Mapping[str, Any]], pruned: Mapping[str, Any]) -> Table:
    """What pruning costs on each text, and what packing and skipping add to it.

    evaluations -- of the result; pruned -- that of the pruned model alone, on the same texts
    """
    before = {row["text"]: row for row in pruned["perplexity"]}
    rows = [
        [
            Path(row["text"]).name,
            row["protocol"],
            with_error(alone["perplexity"], 3),
            with_error(alone["perplexity_ratio"], 4),
            f"{row['perplexity']['value'] / alone['perplexity']['value']:.4f}",
            with_error(row["perplexity_ratio"], 4),
        ]
        for evaluation in evaluations
        for row in evaluation["perplexity"]
        for alone in [before[row["text"]]]
    ]
    columns = ["text", "protocol", "pruned, perplexity", "pruned / source", "result / pruned", "result / source"]
    return Table(columns, rows, "what pruning costs, and what packing and skipping add")


def evaluation_table(result: Mapping[str, Any]) -> str:
    """What `eval` measured."""
    from sparsepack.calibrate.collect import precision
    from sparsepack.models.sparse_attention import in_words

    tasks, attention = result["tasks"], result["subject"]["attention"]
    parts: list[str | Table] = [
        f"{result['subject']['name']} ({result['subject']['kind']})\ncomputed in {precision(result['compute'])}",
        *accuracy_tables([result]),
    ]
    measured = [*result["perplexity"], *([tasks] if tasks else [])]
    if tasks:
        head, tail = ("", " of each weight") if tasks["realised_sparsity"].get("bits") else ("skipped ", "")
        told = skipped(tasks["realised_sparsity"], result["protocol"])
        parts.append(f"{head}in tasks: {told}{tail or ' of the block weights'}")
        if tasks["served"]:
            parts.append(f"in tasks: {describe_hits(tasks['served'])}")
        if tasks["tokens_read"]:
            parts.append(f"read in tasks: {share_read(tasks['tokens_read'])} of the tokens seen")
    if any(row["realised_sparsity"]["neurons_counted"] is False for row in measured):
        parts.append(
            "skipped: not counted, transformers computes inactive neurons like all others; with --backend cpu they are "
            "left out, as by generate"
        )
    if attention is not None:
        told = f"{in_words(attention)}\ntokens read: by layers that read a share"
        reads = any(row["tokens_read"] for row in measured)
        parts.append(f"attention: {told if reads else 'not used by protocol ' + result['protocol']}")
    return markdown(*parts)

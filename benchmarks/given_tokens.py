"""Processor seconds of scoring given tokens by the cpu backend: many at once, and step after step as they are decoded.

FILE is a packed model that skips. Of windows of a text the first half is dense, and the second half is scored, as under
protocol decode of `eval`; rows are questions of a multiple-choice task with a choice each, which is scored.
By steps every row is prefilled with the logits of all positions, as `eval` did until 2026-11-30. Both sides take turns,
and the negative log-likelihood of a scored token says whether they agree.
"""

import json
import lzma
import resource
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.shared.timing import json_option, write_figures
from sparsepack.formats.open import read_packed
from sparsepack.formats.stock import stock_tokenizer
from sparsepack.models.tokenizer.tokens import bos_tokens, encode
from sparsepack.runtime.decoder import GivenTokens
from sparsepack.runtime.engine import Engine

TOGETHER = 8


def processor_seconds() -> float:
    """Return the seconds of all threads so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def by_steps(engine: Engine, rows: Sequence[GivenTokens]) -> list[Tensor]:
    """Return the logits that are scored of each row, with every position prefilled or stepped by itself."""
    found = []
    for row in rows:
        engine.reset()
        dense = engine.prefill(row.ids[: row.sparse_from], every=True) if row.sparse_from else None
        stepped = [engine.step(id) for id in row.ids[row.sparse_from :]]
        both = [*([] if dense is None else [dense]), *([torch.stack(stepped)] if stepped else [])]
        found.append(torch.cat(both)[row.scored_from :])
    return found


def together(engine: Engine, rows: Sequence[GivenTokens]) -> list[Tensor]:
    """Return the same, as `eval --backend cpu` computes it."""
    parts = [rows[first : first + TOGETHER] for first in range(0, len(rows), TOGETHER)]
    return [logits for part in parts for logits in engine.teacher_forced_rows(part)]


def scores(found: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> list[float]:
    """Return the negative log-likelihood of each row's targets."""
    return [
        float(functional.cross_entropy(a, torch.tensor(b), reduction="sum"))
        for a, b in zip(found, targets, strict=True)
    ]


def rows_of_task(path: Path, encoded: Callable[[str], list[int]], documents: int) -> tuple[list[list[int]], list[int]]:
    """Return the ids of each question with each choice, one after the other, and where the choice begins in them."""
    rows, starts = [], []
    for line in lzma.decompress(path.read_bytes()).decode().splitlines()[:documents]:
        document = json.loads(line)
        question = f"Question: {document['query']}\nAnswer:"
        for choice in document["choices"]:
            rows.append(encoded(f"{question} {choice}"))
            starts.append(len(encoded(question)))
    return rows, starts


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), required=True)
@click.option("--task", type=click.Path(path_type=Path), required=True, help="JSON lines, as .xz: query, choices.")
@click.option("--windows", default=1, show_default=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--documents", default=8, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@json_option
def main(
    file: Path,
    text: Path,
    task: Path,
    windows: int,
    context: int,
    documents: int,
    threads: int,
    repeats: int,
    json_path: Path | None,
) -> None:
    """Print the table."""
    packed = read_packed(file)
    tokenizer = stock_tokenizer(packed)
    bos = bos_tokens(tokenizer)
    ids = encode(tokenizer, text.read_text(encoding="utf-8"), ())[: windows * context]
    of_windows = [[*bos, *ids[n * context : (n + 1) * context]][:context] for n in range(windows)]
    half = context // 2
    of_task, starts = rows_of_task(task, lambda words: encode(tokenizer, words, bos), documents)
    cases = {
        "windows, sparse": [GivenTokens(row[:-1], half, half) for row in of_windows],
        "windows, dense": [GivenTokens(row[:-1], context - 1, half) for row in of_windows],
        "task, sparse": [GivenTokens(row[:-1], n - 1, n - 1) for row, n in zip(of_task, starts, strict=True)],
        "task, dense": [GivenTokens(row[:-1], len(row) - 1, n - 1) for row, n in zip(of_task, starts, strict=True)],
    }
    targets = {
        "windows": [row[half + 1 :] for row in of_windows],
        "task": [r[n:] for r, n in zip(of_task, starts, strict=True)],
    }
    alone = Engine(packed, backend="cpu", context=context, threads=threads)
    several = Engine(packed, backend="cpu", context=context, threads=threads, sequences=TOGETHER)
    click.echo(
        "| processor seconds | tokens | by steps | together | times | NLL by steps | together |\n"
        "|---|--:|--:|--:|--:|--:|--:|"
    )
    figures = []
    for name, rows in cases.items():
        seconds: tuple[list[float], list[float]] = [], []
        nll = []
        for _ in range(repeats):
            nll = []
            for taken, engine, score in zip(seconds, (alone, several), (by_steps, together), strict=True):
                start = processor_seconds()
                found = score(engine, rows)
                taken.append(processor_seconds() - start)
                nll.append(sum(scores(found, targets[name.partition(",")[0]])))
        before, after = map(statistics.median, seconds)
        tokens, count = sum(len(row.ids) for row in rows), sum(map(len, targets[name.partition(",")[0]]))
        figures.append({"case": name, "tokens": tokens, "steps": before, "together": after})
        click.echo(
            f"| {name} | {tokens:,} | {before:.2f} | {after:.2f} | {before / after:.2f} | {nll[0] / count:.4f} | "
            f"{nll[1] / count:.4f} |"
        )
    write_figures(json_path, figures)

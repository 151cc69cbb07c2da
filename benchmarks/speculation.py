"""Decoding with prompt look-up beside decoding without, of texts that repeat themselves and one that does not.

Both take turns in one run, ratios are taken within a round. The texts: records of JSON that go on and code that is
written again with a name changed, both greedy, and prose drawn at temperature 1, which hardly repeats itself.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared import machine
from benchmarks.shared.timing import interleave, json_option, median_ratio, write_figures
from sparsepack.loading import Model, load
from sparsepack.runtime.generation.generate import Generated
from sparsepack.tables import Table, markdown

RECORDS = "".join(
    f'{{"id": {n}, "name": "{name}", "address": {{"city": "{city}", "country": "France"}}, "active": true}},\n'
    for n, (name, city) in enumerate(
        [("Anna", "Paris"), ("Bruno", "Lyon"), ("Claire", "Nice"), ("David", "Lille"), ("Emma", "Nantes")], 1
    )
)
CODE = '''def total_price(items, tax):
    """Return the price of all items with tax."""
    total = 0
    for item in items:
        if item.price is None:
            raise ValueError("an item without a price")
        total += item.price * item.count
    return total * (1 + tax)
'''
AGAIN = f"Here is the code:\n\n{CODE}\nHere it is with `tax` renamed to `rate`:\n\ndef total_price(items, rate):\n"
PROSE = "The history of the small harbour town began when"


@click.command()
@click.argument("paths", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--dense", is_flag=True, help="Skip nothing.")
@click.option("--threads", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--most", default=7, show_default=True, help="Tokens of a draft at most.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(
    paths: tuple[Path, ...],
    dense: bool,
    threads: tuple[int, ...],
    most: int,
    tokens: int,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Print the table."""
    rows, figures = [], []
    click.echo(machine.setting_line(machine.setting()))
    texts = {"JSON records": (RECORDS, 0.0), "code again": (AGAIN, 0.0), "prose, drawn": (PROSE, 1.0)}
    for count in threads:
        torch.set_num_threads(count)
        for path in paths:
            model = load(path, threads=count, dense=dense, backend="cpu", context=1024)
            for name, (prompt, temperature) in texts.items():
                made: dict[int, Generated] = {}
                runs = {
                    n: _run(model, prompt, made, n, max_tokens=tokens, temperature=temperature, ignore_eos=True)
                    for n in (0, most)
                }
                speeds = interleave(runs, rounds, warm_up=1)
                ratio, drafted = median_ratio(speeds[most], speeds[0]), made[most]
                alike = sum(a == b for a, b in zip(made[0].tokens, drafted.tokens, strict=False))
                plain, fast = (statistics.median(speeds[n]) for n in (0, most))
                rows.append(
                    [
                        path.stem,
                        name,
                        str(count),
                        f"{plain:.1f}",
                        f"{fast:.1f}",
                        f"{ratio:.2f}",
                        f"{drafted.accepted} of {drafted.drafted}",
                        f"{alike} of {tokens}",
                    ]
                )
                figures.append({"model": str(path), "text": name, "threads": count, "speeds": speeds})
                click.echo(rows[-1], err=True)
    head = ["model", "text", "threads", "t/s without", "t/s with", "x", "drafts accepted", "tokens alike"]
    click.echo(markdown(Table(head, rows, f"prompt look-up of {most}, {rounds} rounds of {tokens} tokens")))
    write_figures(json_path, figures)


def _run(model: Model, prompt: str, made: dict[int, Generated], most: int, **options: Any) -> Callable[[], float]:
    def run() -> float:
        made[most] = model.generate(prompt, prompt_lookup=most, **options).result()
        return made[most].tokens_per_second or 0.0

    return run

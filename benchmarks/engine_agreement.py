"""Perplexity of one zigzag artifact through several runtimes, and their ratios paired over windows.

    python benchmarks/engine_agreement.py m.gguf --text TEXT [--first 48] [--windows 64] [--protocol decode]

Sparse runtimes part ways where an input lies within rounding of its threshold; transformers and the reference engine,
both float32, show how far that alone takes them.
"""

import itertools
import math

import click

from sparsepack.eval.engine_subject import open_engine_subject
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown


@click.command()
@click.argument("path")
@click.option("--text", required=True)
@click.option("--first", default=0, show_default=True, help="Windows to leave out.")
@click.option("--windows", default=32, show_default=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--protocol", default="decode", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of the reference runtime; cuda runs on a GPU.")
@click.option("--runtime", "runtimes", multiple=True, default=("transformers", "reference", "cpu"), show_default=True)
def main(
    path: str,
    text: str,
    first: int,
    windows: int,
    context: int,
    protocol: str,
    device: str,
    runtimes: tuple[str, ...],
) -> None:
    """Print perplexities, and the ratio of every two with its standard error."""
    nll = {}
    for name in runtimes:
        where = {"cuda": "cuda", "cpu": "cpu"}.get(name, device)
        options = EngineOptions(where, backend=name)
        subject = open_subject(path) if name == "transformers" else open_engine_subject(path, options)
        inputs, targets = rolling_windows(subject.tokenizer, read_text(text), context)
        part = slice(first, first + windows)
        scores = score_windows(subject.scorer(), inputs[part], targets[part], protocol)
        nll[name] = scores.nll / scores.targets
    print(
        markdown(
            Table(["runtime", "perplexity"], [[name, f"{math.exp(float(x.mean())):.3f}"] for name, x in nll.items()])
        )
    )
    rows = []
    for a, b in itertools.combinations(nll, 2):
        difference = nll[b] - nll[a]
        error = float(difference.std()) / math.sqrt(len(difference))
        rows.append([f"{b} / {a}", f"{math.exp(float(difference.mean())):.5f} ± {error:.5f}"])
    print(f"\n{protocol}, {len(difference)} windows of {context}\n\n{markdown(Table(['runtimes', 'ratio'], rows))}")


if __name__ == "__main__":
    main()

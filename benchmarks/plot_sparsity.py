"""Draw what benchmarks/sparsity_accuracy.py measured: perplexity lost against realised sparsity, one panel a text.

python benchmarks/plot_sparsity.py benchmarks/results/books-26m-silu.sparsity*.json -o benchmarks/sparsity.png
"""

import json
from pathlib import Path

import click

_COLOURS = {"uniform": "#888888", "teal": "#d08020", "global": "#2060b0", "global --offsets": "#208040"}


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--protocol", default="decode", show_default=True)
@click.option("--criterion", default="magnitude", show_default=True)
def main(results: tuple[Path, ...], output: Path, protocol: str, criterion: str) -> None:
    """Plot RESULTS, JSON files that sparsity_accuracy.py writes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = [row for path in results for row in json.loads(path.read_text())]
    rows = [row for row in every if row["protocol"] == protocol and row["criterion"] == criterion]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    figure, panels = pyplot.subplots(1, len(texts), figsize=(4.6 * len(texts), 3.4), sharey=True, squeeze=False)
    for text, panel in zip(texts, panels[0], strict=True):
        for allocation, colour in _COLOURS.items():
            points = sorted(
                (row["realised_sparsity"], 100 * (row["perplexity_ratio"]["value"] - 1))
                for row in rows
                if row["text"] == text and row["allocation"] == allocation
            )
            panel.plot(*zip(*[(0.0, 0.0), *points], strict=True), marker="o", ms=4, color=colour, label=allocation)
        panel.set_title(text, fontsize=10)
        panel.set_xlabel("realised sparsity (share of weights skipped)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"perplexity lost, % ({protocol})")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()

"""Draw what is lost against what is read: perplexity over bits read per weight and token, K-quants beside our own.

python benchmarks/plot_lost.py ROTATION.json ... --kquants KQUANTS.json -o benchmarks/lost.png

The files are those that rotation_accuracy.py and kquants_accuracy.py write, of the same windows.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

_KINDS = {
    "llama.cpp's K-quants": ("#888888", "s"),
    "skipping, as it was": ("#d08020", "o"),
    "on a basis": ("#2060b0", "o"),
    "on a basis, with error feedback": ("#208040", "D"),
}


def _kind(name: str) -> str:
    """Which of the kinds a row of rotation_accuracy.py is."""
    on_basis = name.startswith(("pca", "learnt", "hadamard"))
    if not on_basis:
        return "skipping, as it was"
    return "on a basis, with error feedback" if "gptq" in name else "on a basis"


def points(rows: Iterable[Mapping[str, Any]], kquants: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """Bits read, perplexity lost in per cent, and the name of each row of quantised weights, by kind."""
    found: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in _KINDS}
    for row in kquants:
        found["llama.cpp's K-quants"].append((*_place(row), row["type"]))
    for row in rows:
        if "Q4_K" in row["row"]:
            found[_kind(row["row"])].append((*_place(row), row["row"].removesuffix(", Q4_K")))
    return found


def _place(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["bits_read"], 100 * (row["perplexity_ratio"]["value"] - 1)


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--kquants", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(results: tuple[Path, ...], kquants: Path, output: Path) -> None:
    """Plot RESULTS, JSON files that rotation_accuracy.py writes, beside K-quants."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for path in results for row in json.loads(path.read_text())]
    figure, panel = pyplot.subplots(figsize=(7.2, 4.4))
    for kind, found in points(rows, json.loads(kquants.read_text())).items():
        colour, marker = _KINDS[kind]
        line = sorted(found)
        panel.plot([x for x, _, _ in line], [y for _, y, _ in line], marker, ms=5, color=colour, label=kind)
        for x, y, name in line:
            panel.annotate(name, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=6, color=colour)
    panel.set_yscale("log")
    panel.set_xlabel("bits read per weight of the blocks and token")
    panel.set_ylabel("perplexity lost, %")
    panel.grid(alpha=0.3, which="both")
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()

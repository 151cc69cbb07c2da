"""Draw what is lost against what is read: perplexity over bits read per weight and token, next to llama.cpp's K-quants.

RESULTS are the files that what_is_lost writes, --kquants the one that kquants writes, of the same windows.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.thresholds import AllocationOptions

_KINDS = {
    "llama.cpp's K-quants": ("#888888", "s"),
    "no basis": ("#d08020", "o"),
    "on a basis": ("#2060b0", "o"),
    "with error feedback": ("#208040", "D"),
}

GAP, WIDTH, RIGHT = 7.5, 170.0, 4.0
"""Points of height between labels, the width in which they would overlap, and the bits from which one stands left."""


def _kind(name: str) -> str:
    """Which of the kinds a row of what_is_lost is."""
    if "gptq" in name:
        return "with error feedback"
    return "on a basis" if name.startswith(("pca", "learnt", "hadamard")) else "no basis"


def points(
    rows: Iterable[Mapping[str, Any]], kquants: Iterable[Mapping[str, Any]], text: str, without: Collection[str] = ()
) -> dict[str, list[tuple[Any, ...]]]:
    """Bits read, perplexity lost in per cent, and the name of each row of quantised weights on one text, by kind; none
    of the rows whose name has one of the words `without`."""
    found: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in _KINDS}
    for row in kquants:
        found["llama.cpp's K-quants"].append((*_place(row), row["type"]))
    for row in rows:
        if "Q4_K" in row["row"] and row["text"] == text and not any(word in row["row"] for word in without):
            found[_kind(row["row"])].append((*_place(row), _label(row)))
    return found


def _label(row: Mapping[str, Any]) -> str:
    """What was done, and in how many steps where those are not the default."""
    usual = row["steps"] == AllocationOptions.steps
    return str(row["row"]).removesuffix(", Q4_K") + ("" if usual else f", {row['steps']} steps")


def _place(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["bits_read"], 100 * (row["perplexity_ratio"]["value"] - 1)


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--kquants", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--text", default="books.validation.jsonl.xz", show_default=True, help="The rows of this text.")
@click.option("--without", multiple=True, help="Leave rows out whose name has this word.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(results: tuple[Path, ...], kquants: Path, text: str, without: tuple[str, ...], output: Path) -> None:
    """Plot RESULTS, JSON files that what_is_lost writes, beside K-quants."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for path in results for row in json.loads(path.read_text())]
    figure, panel = pyplot.subplots(figsize=(7.2, 4.4))
    labels: list[tuple[float, float, str, str]] = []
    for kind, found in points(rows, json.loads(kquants.read_text()), text, without).items():
        colour, marker = _KINDS[kind]
        line = sorted(found)
        panel.plot([x for x, _, _ in line], [y for _, y, _ in line], marker, ms=5, color=colour, label=kind)
        labels += [(x, y, name, colour) for x, y, name in line]
    panel.set_yscale("log")
    panel.set_yticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"])
    figure.canvas.draw()
    points_of = 72 / figure.dpi
    placed: list[tuple[float, float]] = []
    for x, y, name, colour in sorted(labels, key=lambda label: label[1]):
        at = points_of * panel.transData.transform((x, y))
        below = [height + GAP for place, height in placed if abs(place - at[0]) < WIDTH]
        height = max([at[1], *below])
        placed.append((at[0], height))
        shift = (-6, height - at[1] - 2) if x > RIGHT else (6, height - at[1] - 2)
        side = "right" if x > RIGHT else "left"
        panel.annotate(name, (x, y), xytext=shift, textcoords="offset points", fontsize=6, color=colour, ha=side)
    panel.set_xlabel("bits read per weight of the blocks and token")
    panel.set_ylabel("perplexity lost, %")
    panel.grid(alpha=0.3, which="both")
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=130)

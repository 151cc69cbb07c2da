"""Draw what is lost against what is read: KL divergence over bits read of a weight, next to llama.cpp's types.

FIGURES is the file that small_models writes. A panel for each of its models.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

_KINDS = {
    "zigzag-q6_p": ("#2060b0", "o-"),
    "zigzag-q4_k": ("#d08020", "D--"),
    "llama.cpp": ("#707070", "s"),
}
"""Colour and marker of each kind of row, by how its name begins."""

GAP, WIDTH = 8.0, 60.0
"""Points of height between labels, and the width in which they would overlap."""

Point = tuple[float, float, str]
"""Bits read, KL divergence in nats, label."""


def points(figures: Iterable[Mapping[str, Any]], model: str, text: str) -> dict[str, list[Point]]:
    """Return the rows of one model on one text by their kinds, from few bits read to many."""
    found: dict[str, list[Point]] = {kind: [] for kind in _KINDS}
    for row in figures:
        kind = next((kind for kind in _KINDS if row["row"].startswith(kind)), None)
        if kind is not None and row["model"] == model:
            of_text = row["texts"][text]
            name = row["row"].removeprefix(kind).strip()
            found[kind].append((of_text["bits_read"], of_text["kl_divergence"]["value"], name or "all read"))
    return {kind: sorted(each) for kind, each in found.items()}


def label_heights(places: Sequence[tuple[float, float]]) -> list[float]:
    """Return for labels at places [points across, points up] how far up each stands so that none lies on another: those
    that are lowest keep their places."""
    heights = [0.0] * len(places)
    placed: list[tuple[float, float]] = []
    for number in sorted(range(len(places)), key=lambda number: places[number][1]):
        across, up = places[number]
        for other, height in sorted(placed, key=lambda each: each[1]):
            if abs(other - across) < WIDTH and abs(height - up) < GAP:
                up = height + GAP
        heights[number] = up
        placed.append((across, up))
    return heights


@click.command()
@click.argument("figures", type=click.Path(path_type=Path, exists=True))
@click.option("--text", default="wikitext2", show_default=True, help="The text that was scored.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(figures: Path, text: str, output: Path) -> None:
    """Plot FIGURES, a JSON file that small_models writes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = json.loads(figures.read_text())
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(1.6 + 4.6 * len(models), 4.4), sharey=True, squeeze=False)
    for model, panel in zip(models, panels[0], strict=True):
        found = points(rows, model, text)
        for kind, of_kind in found.items():
            colour, marker = _KINDS[kind]
            of_peer = "llama.cpp, importance matrix" if kind == "llama.cpp" else kind
            if of_kind:
                panel.plot(
                    *zip(*[(x, y) for x, y, _ in of_kind], strict=True), marker, ms=5, color=colour, label=of_peer
                )
        panel.set_yscale("log")
        panel.set_xlim(1.8, 9)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_title(model.partition(".")[0].removesuffix("-q4_k_m"), fontsize=10)
        panel.set_xlabel("bits read of a weight of the blocks, for each token")
        panel.grid(alpha=0.3, which="both")
    panels[0, 0].set_ylabel(f"KL divergence, nats ({text})")
    panels[0, -1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.canvas.draw()
    for model, panel in zip(models, panels[0], strict=True):
        labels = [(kind, *point) for kind, of_kind in points(rows, model, text).items() for point in of_kind]
        places = [panel.transData.transform((x, y)) * 72 / figure.dpi for _, x, y, _ in labels]
        for (kind, x, y, name), (_, up), height in zip(labels, places, label_heights(places), strict=True):
            options = {"xytext": (6, height - up - 2), "textcoords": "offset points", "fontsize": 6}
            panel.annotate(name, (x, y), color=_KINDS[kind][0], **options)
    figure.savefig(output, dpi=130)

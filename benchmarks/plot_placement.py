"""Draw what benchmarks/placement.py measured: how much of what is needed has a place, and what is read from the host.

python benchmarks/plot_placement.py benchmarks/results/placement.json -o benchmarks/placement.png
"""

import json
from pathlib import Path

import click

_SHOWN = {
    "static-same-share": ("#aaaaaa", "same share of each block"),
    "static": ("#444444", "across blocks, nothing moves"),
    "momentum": ("#d08020", "momentum, lambda 0.67"),
    "slow": ("#2060b0", "slow momentum"),
    "belady": ("#60a060", "Belady (knows the future)"),
}


@click.command()
@click.argument("results", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(results: Path, output: Path) -> None:
    """Plot RESULTS, the JSON that placement.py writes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(results.read_text())["text"]["results"]
    figure, (hits, reads) = pyplot.subplots(1, 2, figsize=(9.2, 3.6))
    for policy, (colour, label) in _SHOWN.items():
        of = [row for row in rows if row["policy"] == policy]
        shares = [100 * row["cached"] for row in of]
        settings = {"marker": "o", "ms": 4, "color": colour, "label": label}
        errors = [row["hit_rate"]["stderr"] for row in of]
        hits.errorbar(shares, [row["hit_rate"]["value"] for row in of], errors, **settings)
        reads.plot(shares, [row["host_reads"] for row in of], **settings)
    hits.set_ylabel("share of what is needed that has a place")
    reads.set_ylabel("neurons read from host memory per token")
    for panel in (hits, reads):
        panel.set_xlabel("share of the neurons that have places, %")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    hits.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()

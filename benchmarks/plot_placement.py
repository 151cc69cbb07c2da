"""Draw what benchmarks/placement.py measured, of some of the policies.

python benchmarks/plot_placement.py benchmarks/results/placement.json -o benchmarks/placement.png
"""

import json
from pathlib import Path

import click

from sparsepack.simulation.plot import plot

_SHOWN = ("static-same-share", "static", "momentum", "slow", "belady")


@click.command()
@click.argument("results", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(results: Path, output: Path) -> None:
    """Plot RESULTS, the JSON that placement.py writes."""
    found = json.loads(results.read_text())["text"]
    plot(found, output, _SHOWN)


if __name__ == "__main__":
    main()

"""Which neurons should live where: what places across blocks, published policies and a slow one serve of a real model.

    python benchmarks/placement.py [--model MODEL --calibration-text CAL --text TEXT --other OTHER] [--work FOLDER]

Without options it takes books-26m-relu and its texts from SPARSEPACK_SHARED. A calibration of --samples windows gives
the frequencies; traces of TEXT, and of OTHER, which is text of another kind, are played. Both are made once in --work.

Printed are: who is active; places in each block, and what they serve beside the same share of each block; every policy
for every share; the same on OTHER at 30 %; and the settings of the slow momentum, chosen on every second session by the
fewest neurons read from host memory at 30 %, with what they and the default ones serve on the others.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import click
import numpy as np

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.neurons import activity
from sparsepack.calibrate.options import CalibrateOptions
from sparsepack.calibrate.run import calibrate
from sparsepack.cli.neurons import neurons_table
from sparsepack.cli.simulation import simulation_table
from sparsepack.inspect import inspect
from sparsepack.markdown import table
from sparsepack.placement.names import POLICIES
from sparsepack.placement.placement import across_blocks, budget_of, same_share
from sparsepack.placement.policies import Slow, Start, slow
from sparsepack.simulate.options import SimulateOptions
from sparsepack.simulate.play import play
from sparsepack.simulate.run import simulate
from sparsepack.trace.collect import trace
from sparsepack.trace.options import TraceOptions
from sparsepack.trace.trace import Trace
from sparsepack.trace.trace import load as load_trace

SHARED = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
CHOSEN_AT = 0.3


@click.command()
@click.option("--model", default=str(SHARED / "models" / "books-26m-relu"))
@click.option("--calibration-text", default=str(SHARED / "text" / "books.calibration.jsonl.xz"))
@click.option("--text", default=str(SHARED / "text" / "books.validation.jsonl.xz"))
@click.option("--other", default=str(SHARED / "text" / "wikitext2.test.txt.xz"), help="Text of another kind.")
@click.option("--samples", default=72, help="Windows of the calibration, of 2048 tokens.")
@click.option("--sessions", default=TraceOptions.sessions)
@click.option("--tokens", default=TraceOptions.tokens, help="Of a session, and of a window.")
@click.option("--cached", default=SimulateOptions.cached)
@click.option("--work", default="/tmp/sparsepack-placement", type=click.Path(path_type=Path))
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    model: str,
    calibration_text: str,
    text: str,
    other: str,
    samples: int,
    sessions: int,
    tokens: int,
    cached: str,
    work: Path,
    json_path: Path | None,
) -> None:
    """Print the tables for one model."""
    work.mkdir(exist_ok=True)
    if not (work / "calibration").exists():
        calibrate(model, calibration_text, work / "calibration", CalibrateOptions(context=tokens, samples=samples))
    for name, source in (("text", text), ("other", other)):
        if not (work / name).exists():
            trace(model, source, work / name, TraceOptions(sessions=sessions, tokens=tokens))
    calibration = load_calibration(work / "calibration")
    click.echo(neurons_table(inspect(work / "text")["neurons"]))
    click.echo(
        f"\nplaces, as shares of each block, by the frequencies of {samples} windows\n\n{_places(calibration, cached)}"
    )
    found = {
        "text": simulate(work / "text", calibration, SimulateOptions(cached=cached, policy=",".join(POLICIES))),
        "other": simulate(work / "other", calibration, SimulateOptions(cached=str(CHOSEN_AT))),
    }
    click.echo(f"\n{Path(text).name}: {simulation_table(found['text'])}")
    click.echo(f"\n{Path(other).name}: {simulation_table(found['other'])}")
    chosen = _chosen(load_trace(work / "text"), calibration)
    click.echo(f"\n{_said(chosen)}")
    if json_path:
        json_path.write_text(json.dumps({**found, "settings": chosen}, indent=1))


def _frequency(calibration: Calibration) -> np.ndarray:
    return np.stack([layer.frequency.numpy() for layer in activity(calibration)])


def _places(calibration: Calibration, cached: str) -> str:
    frequency = _frequency(calibration)
    rows = []
    for share in map(float, cached.split(",")):
        budget = budget_of(share, frequency)
        across, same = across_blocks(frequency, budget), same_share(frequency, budget)
        shares = [f"{count / frequency.shape[1]:.2f}" for count in across.places]
        rows.append([f"{100 * share:g} %", *shares, *(f"{_served(frequency, each):.3f}" for each in (same, across))])
    blocks = [f"block {number}" for number in range(len(frequency))]
    return table(["places", *blocks, "serve, same share", "across blocks"], rows)


def _served(frequency: np.ndarray, placement: Any) -> float:
    """Of the calibration's own activations."""
    return float(frequency[placement.resident].sum() / frequency.sum())


def _chosen(traced: Trace, calibration: Calibration) -> dict[str, Any]:
    """The settings that read the fewest neurons on every second session, and what they serve on the others."""
    frequency = _frequency(calibration)
    starts = [
        Start(frequency, round(CHOSEN_AT * frequency.size), needed.reshape(len(needed), *frequency.shape), row.prompt)
        for number, row in enumerate(traced.sessions)
        for needed in [traced.session(number).view(np.uint8)]
    ]
    grid = [Slow(decay, margin) for decay, margin in itertools.product((0.98, 0.99, 0.995, 0.998), (0.0, 0.02, 0.05))]
    tried = {settings: _figures(settings, starts[::2]) for settings in grid}
    best = min(tried, key=lambda settings: tried[settings]["host_reads"])
    return {
        "tried": [{**vars(settings), **figures} for settings, figures in tried.items()],
        "chosen": {**vars(best), **_figures(best, starts[1::2])},
        "default": {**vars(Slow()), **_figures(Slow(), starts[1::2])},
    }


def _figures(settings: Slow, starts: list[Start]) -> dict[str, float]:
    found = [play(slow(settings), start) for start in starts]
    needed, hits, moves, tokens = (
        sum(getattr(one, name) for one in found) for name in ("needed", "hits", "moves", "tokens")
    )
    return {"hit_rate": hits / needed, "moves": moves / tokens, "host_reads": (needed - hits + moves) / tokens}


def _said(found: dict[str, Any]) -> str:
    rows = [["tried on every second session", row] for row in found["tried"]]
    rows += [[f"{which}, on the others", found[which]] for which in ("chosen", "default")]
    cells = [
        [name, row["decay"], row["margin"], f"{row['hit_rate']:.4f}", f"{row['moves']:.2f}", f"{row['host_reads']:.1f}"]
        for name, row in rows
    ]
    head = ["settings of the slow momentum", "lambda", "margin", "hit rate", "moves", "host reads"]
    return table(head, cells)


if __name__ == "__main__":
    main()

"""Are some experts used more than others, does a token want those of the one before it, and what do slots serve then?

    python benchmarks/expert_skew.py [--model MODEL --calibration-text CAL --text TEXT --other OTHER]

Without options it takes the mixture and the texts that ship with sparsepack; OTHER, text of another kind, is the
held-out books of SPARSEPACK_SHARED. Counts are of CAL, sessions of TEXT and of OTHER. Printed are, for both texts:

    counted     the share of visits by the quarter of each block's experts that CAL used most
    own         by the quarter that the session itself used most, known beforehand
    numbers     by the quarter of the expert numbers that it used most, a number's visits in all blocks together: what
                the stock model's load-balancing loss sees, which is over all blocks at once
    even        what any quarter would have, were all used alike
    again d     the share of a token's experts that the token d before it had, too; "by chance" what that would be, did
                tokens choose by the session's own frequencies, one without regard to the other

and what each policy serves, as `simulate` has it.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from books import BOOKS, Study, study_options
from figures import json_option, write_figures

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.cli.verbs.simulate import simulation_table
from sparsepack.eval.standard_error import mean, with_error
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate
from sparsepack.tables import Table, markdown
from sparsepack.tracing.collect import trace
from sparsepack.tracing.options import TraceOptions
from sparsepack.tracing.trace import Trace, neuron_counts

QUARTER = 0.25
DISTANCES = (1, 4, 32)


@click.command()
@study_options(
    Study(
        model="shipped:tiny-mixture",
        calibration_text="shipped:train",
        text="shipped:heldout",
        other=BOOKS["text"],
        samples=64,
        sessions=12,
        tokens=512,
        cached="0.125,0.25,0.5,0.75",
    )
)
@click.option("--prompt", default=64, show_default=True)
@json_option
def main(study: Study, prompt: int, json_path: Path | None) -> None:
    """Print the tables."""
    options = TraceOptions(sessions=study.sessions, tokens=study.tokens, prompt=prompt)
    with tempfile.TemporaryDirectory() as work:
        of_windows = CalibrateOptions(samples=study.samples, context=study.tokens)
        made = calibrate(study.model, study.calibration_text, Path(work) / "calibration", of_windows)
        frequency = neuron_counts(made).frequency.numpy()
        figures: dict[str, Any] = {}
        for name, source in {"text": study.text, "other": study.other}.items():
            traced = trace(study.model, source, Path(work) / name, options)
            if traced.unit != "experts":
                raise click.UsageError(f"{study.model}: its MLPs are no mixtures of experts")
            played = simulate(traced, made, SimulateOptions(cached=study.cached))
            figures[source] = {"skew": skew(traced, frequency), "simulation": played}
            click.echo(f"\n## {source}\n{skew_table(figures[source]['skew'])}\n\n{simulation_table(played)}")
    write_figures(json_path, figures)


def skew(traced: Trace, frequency: np.ndarray) -> dict[str, Any]:
    """The figures of a trace's sessions, each a mean over sessions with its standard error.

    frequency -- [blocks, experts], of the calibration
    """
    found: dict[str, list[float]] = {}
    for session in range(len(traced.sessions)):
        active = np.stack([traced.active(session, block) for block in range(traced.layers)], 1)
        visits = active.sum(0)
        rows = {"counted": of_most_used(visits, frequency), "own": of_most_used(visits, visits)}
        numbers = visits.sum(0, keepdims=True)
        rows["numbers"] = of_most_used(numbers, numbers)
        rows |= {f"again {distance}": again(active, distance) for distance in DISTANCES}
        rows["again, by chance"] = again_by_chance(active)
        for name, value in rows.items():
            found.setdefault(name, []).append(value)
    return {"even": QUARTER, **{name: mean(torch.tensor(values)) for name, values in found.items()}}


def of_most_used(visits: np.ndarray, ranked_by: np.ndarray) -> float:
    """The share of visits by the quarter of each block's experts that `ranked_by` has as its largest: [blocks,
    experts], both."""
    count = round(QUARTER * visits.shape[1])
    most = np.argsort(-ranked_by, axis=1, kind="stable")[:, :count]
    return float(np.take_along_axis(visits, most, 1).sum() / visits.sum())


def again(active: np.ndarray, distance: int) -> float:
    """The share of tokens' experts that the token `distance` before had, too: of bool [tokens, blocks, experts]."""
    return float((active[distance:] & active[:-distance]).sum() / active[distance:].sum())


def again_by_chance(active: np.ndarray) -> float:
    """What `again` would be, were tokens of these frequencies independent of each other."""
    often = active.mean(0)  # [blocks, experts]
    return float(np.square(often).sum() / often.sum())


def skew_table(found: Mapping[str, Any]) -> str:
    """The figures as a table."""
    shown = {name: value if isinstance(value, float) else with_error(value, 3) for name, value in found.items()}
    return markdown(Table(list(shown), [[str(value) for value in shown.values()]]))


if __name__ == "__main__":
    main()

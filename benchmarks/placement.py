"""Which neurons should live where: what slots across blocks, published policies and a slow one reach on a real model.

    python benchmarks/placement.py [--model MODEL --calibration-text CAL --text TEXT --other OTHER] [--work FOLDER]

Without options it takes books-26m-relu and its texts from SPARSEPACK_SHARED. A calibration of --samples windows gives
the frequencies; traces of TEXT, and of OTHER, which is text of another kind, are played. All are made once in --work.

Printed are: who is active; slots in each block, and their hit rate beside the same share of each block; every policy
for every share; the same on OTHER at 30 %; the settings of the slow momentum, chosen on every second session by the
fewest neurons read from host memory at 30 %, with what they and the default ones serve on the others; and groups of
neurons that move together, of --blocks, at 30 %; and how long a decision of
the slow momentum takes for a model of 70B. --only-groups prints the last two alone.
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from books import BOOKS, SHARED, Study, study_options
from figures import json_option, write_figures

from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.folder import load as load_calibration
from sparsepack.calibration.neurons import activity
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.cli.tables import neurons_table
from sparsepack.cli.verbs.simulate import simulation_table
from sparsepack.inspection import inspect
from sparsepack.placement.names import POLICIES
from sparsepack.placement.placement import HitCounts, across_blocks, budget_of, same_share
from sparsepack.placement.policies import POLICIES as POLICY_ROWS
from sparsepack.placement.policies import Slow, Start, momentum, play, slow
from sparsepack.simulation.groups import grouped_frequency, groups_of, needed_of
from sparsepack.simulation.options import ORDERS, SimulateOptions
from sparsepack.simulation.run import simulate
from sparsepack.tables import Table, markdown
from sparsepack.tracing.collect import trace
from sparsepack.tracing.options import TraceOptions
from sparsepack.tracing.trace import Trace
from sparsepack.tracing.trace import load as load_trace

CHOSEN_AT = 0.3
GROUP_POLICIES = {
    "static": POLICY_ROWS["static"].begin,
    "momentum .67 (neurons moved)": momentum(0.67),
    "momentum .95 (neurons moved)": momentum(0.95),
}


@click.command()
@study_options(
    Study(
        **BOOKS,
        other=str(SHARED / "text" / "wikitext2.test.txt.xz"),
        samples=72,
        sessions=TraceOptions.sessions,
        tokens=TraceOptions.tokens,
        cached=SimulateOptions.cached,
    )
)
@click.option("--blocks", default="1,4,6,7", help="Whose neurons form groups.")
@click.option("--only-groups", is_flag=True)
@click.option("--work", default="/tmp/sparsepack-placement", type=click.Path(path_type=Path))
@json_option
def main(study: Study, blocks: str, only_groups: bool, work: Path, json_path: Path | None) -> None:
    """Print the tables for one model."""
    # Other settings do not find these.
    work = work / f"{Path(study.model).name}-{study.samples}x{study.tokens}-{study.sessions}"
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "calibration").exists():
        options = CalibrateOptions(context=study.tokens, samples=study.samples)
        calibrate(study.model, study.calibration_text, work / "calibration", options)
    for name, source in (("text", study.text), ("other", study.other)):
        if not (work / name).exists():
            trace(study.model, source, work / name, TraceOptions(sessions=study.sessions, tokens=study.tokens))
    calibration = load_calibration(work / "calibration")
    found = {} if only_groups else _policies(work, calibration, study.cached)
    for name, source in (("text", study.text), ("other", study.other)):
        if name in found:  # files, not where they are on this machine
            found[name]["trace"]["name"], found[name]["model"]["name"] = Path(source).name, Path(study.model).name
    blocks_of_groups = [int(block) for block in blocks.split(",")]
    found["groups"] = _groups(load_trace(work / "text"), _frequency(calibration), blocks_of_groups)
    click.echo(f"\ngroups of neurons of blocks {blocks}, at {CHOSEN_AT:.0%}\n\n{_groups_table(found['groups'])}")
    click.echo(f"\na decision of the slow momentum over 2.3 million neurons: {1e3 * _decision():.0f} ms")
    write_figures(json_path, found)


def _decision(shape: tuple[int, int] = (80, 28672)) -> float:
    """Seconds of a decision of the slow momentum over the neurons of a 70B shape; of 8, the median."""
    random = np.random.default_rng(0)
    frequency = random.random(shape) ** 3 * 0.54  # a mean of 0.135, most of them far below
    start = Start(frequency, budget_of(CHOSEN_AT, frequency), np.zeros((0, *shape), np.uint8), prompt=0)
    placement, move = slow(Slow())(start)
    assert move is not None
    resident, taken = placement.resident, []
    for token in range(8 * Slow.every):
        needed = (random.random(shape) < frequency).view(np.uint8)
        began = time.perf_counter()
        resident = move(token, needed, resident)
        if (token + 1) % Slow.every == 0:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _policies(work: Path, calibration: Calibration, cached: str) -> dict[str, Any]:
    """Print all tables but that of groups."""
    click.echo(neurons_table(inspect(work / "text")["neurons"]))
    windows = calibration.manifest["tokens"]["windows"]
    click.echo(
        f"\nslots, as shares of each block, by the frequencies of {windows} windows\n\n{_slots(calibration, cached)}"
    )
    text = simulate(work / "text", calibration, SimulateOptions(cached=cached, policy=",".join(POLICIES)))
    click.echo(f"\nthe text: {simulation_table(text)}")
    other = simulate(work / "other", calibration, SimulateOptions(cached=str(CHOSEN_AT)))
    click.echo(f"\ntext of another kind: {simulation_table(other)}")
    chosen = _chosen(load_trace(work / "text"), calibration)
    click.echo(f"\n{_said(chosen)}")
    return {"text": text, "other": other, "settings": chosen}


def _frequency(calibration: Calibration) -> np.ndarray:
    return np.stack([layer.frequency.numpy() for layer in activity(calibration)])


def _slots(calibration: Calibration, cached: str) -> str:
    frequency = _frequency(calibration)
    rows = []
    for share in map(float, cached.split(",")):
        budget = budget_of(share, frequency)
        across, same = across_blocks(frequency, budget), same_share(frequency, budget)
        shares = [f"{count / frequency.shape[1]:.2f}" for count in across.slots]
        rows.append([f"{100 * share:g} %", *shares, *(f"{_hit_rate(frequency, each):.3f}" for each in (same, across))])
    blocks = [f"block {number}" for number in range(len(frequency))]
    return markdown(Table(["slots", *blocks, "hit rate, same share", "across blocks"], rows))


def _hit_rate(frequency: np.ndarray, placement: Any) -> float:
    """The share of the calibration's own activations that a placement serves."""
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
    total = sum((play(slow(settings), start) for start in starts), HitCounts())
    host_reads = (total.needed - total.hits + total.moves) / total.tokens
    return {"hit_rate": total.hit_rate, "moves": total.moves / total.tokens, "host_reads": host_reads}


def _said(found: dict[str, Any]) -> str:
    rows = [["tried on every second session", row] for row in found["tried"]]
    rows += [[f"{which}, on the others", found[which]] for which in ("chosen", "default")]
    cells = [
        [name, row["decay"], row["margin"], f"{row['hit_rate']:.4f}", f"{row['moves']:.2f}", f"{row['host_reads']:.1f}"]
        for name, row in rows
    ]
    head = ["settings of the slow momentum", "lambda", "margin", "hit rate", "moves", "host reads"]
    return markdown(Table(head, cells))


def _groups(traced: Trace, every: np.ndarray, blocks: list[int]) -> list[dict[str, Any]]:
    """The hit rate of groups where every block has the same share of slots: each is played alone."""
    rows = []
    for size, order in [(1, "frequency"), *itertools.product((8, 16, 32), ORDERS)]:
        groups = groups_of(every, order, size)
        frequency = grouped_frequency(every, groups)
        found: dict[str, list[HitCounts]] = {name: [] for name in GROUP_POLICIES}
        active, touched = np.zeros(len(blocks)), np.zeros(len(blocks))
        for number, session in enumerate(traced.sessions):
            needed = needed_of(traced, number, groups)[:, blocks]
            active += needed[session.prompt :].sum((0, 2))
            touched += size * np.count_nonzero(needed[session.prompt :], axis=(0, 2))
            for index, block in enumerate(blocks):
                slots = round(CHOSEN_AT * frequency.shape[1])
                start = Start(frequency[[block]], slots, needed[:, [index]], session.prompt, size)
                for name, policy in GROUP_POLICIES.items():
                    found[name].append(play(policy, start))
        tokens = sum(session.tokens - session.prompt for session in traced.sessions)
        total = {name: sum(outcomes, HitCounts()) for name, outcomes in found.items()}
        rows.append(
            {"group": size, "order": order, "active_share": float((active / touched).mean())}
            | {name: {"hit_rate": of.hit_rate, "moves": size * of.moves / tokens} for name, of in total.items()}
        )
    return rows


def _groups_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            str(row["group"]),
            row["order"],
            f"{row['active_share']:.3f}",
            *(
                f"{row[name]['hit_rate']:.3f}" + (f" ({row[name]['moves']:.0f})" if row[name]["moves"] else "")
                for name in GROUP_POLICIES
            ),
        ]
        for row in rows
    ]
    return markdown(Table(["group", "order", "active share of touched groups, mean of blocks", *GROUP_POLICIES], cells))


if __name__ == "__main__":
    main()

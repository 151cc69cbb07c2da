"""Does placing neurons pay in a model with SiLU, where thresholds say who is active? Skew, slots, and the speed to win.

    python benchmarks/placement_silu.py [--model MODEL --calibration-text CAL --text TEXT]

Without options it takes books-26m-silu and its texts from SPARSEPACK_SHARED. SiLU leaves nothing exactly zero; active
are those above a threshold of their block, which a share of them passes on the calibration text:

    gate and up   |silu(gate) * up|: gates and up rows of all neurons are read to know, and then an active one's down
                  column. It is what thresholds at `mlp_mid` compare (TEAL).
    gate          |silu(gate)|: gates of all neurons are read to know, and then an active one's up row and down column
                  (CATS). The most wanted neurons by this rule are not always those of the other.
    columns       no neurons: inactive input columns of all four sites are skipped (zigzag)

First comes what each costs in accuracy, for several shares, on the second halves of windows (protocol `decode`). The
rules are then compared at the same accuracy: the smallest share of each whose perplexity is no higher than that of
"gate and up" with --share. Sessions of TEXT are played as `simulate` does, slots given out by how often neurons were
active in sessions of the calibration text. The model of time says how fast models of 13B and 70B would be, for budgets:

    llama.cpp           dense, as many of the weights as fit on the GPU
    columns, by layers  the same division of the weights, of which both sides read what the rule of columns leaves
    rule, by layers     the same division, both sides read what the rule of neurons leaves
    rule, far last      the GPU has what is read whole, and what an active neuron needs is far away, as much as must be,
                        whole blocks of it: no placement by neurons
    any                 slots for the same share of each block, whoever has them: both sides work at the same time
    static, slow, ..    slots for neurons by that policy, where all that is read whole fits on the GPU; "and bus" with
                        the GPU reading a part of what has no slot over the bus
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from accuracy_windows import Windows, windows_of
from books import SHARED
from figures import json_option, write_figures
from silu_speeds import BOTH, GATE, PLACED, Played, speeds, speeds_table
from torch import Tensor

from sparsepack.calibration.collectors import histogram
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.protocols import scored_from
from sparsepack.eval.scorer import SparseScorer
from sparsepack.eval.standard_error import exp_mean, with_error
from sparsepack.eval.subject import StockSubject, open_subject
from sparsepack.files.text import read_text
from sparsepack.models.family import MLP_MID, SITES
from sparsepack.models.records.rule import Rules, SiteRule
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.tokenizer.windows import session_windows
from sparsepack.progress import progress
from sparsepack.tables import Table, markdown

COLUMNS = "columns"
SINKS = 4
"""First positions of a calibration window, which thresholds are not made for."""
PLAYED = (*PLACED, "lru")

Thresholds = Mapping[tuple[int, str], Tensor]
"""(layer, site or GATE) -> histogram of the magnitudes there, int64 [bins]."""


@contextmanager
def watched(subject: StockSubject, function: Callable[[int, str, Tensor], Tensor | None]) -> Iterator[None]:
    """Show `function` (layer, site or GATE, values [B, S, n]) what enters each site and what the activation of the gate
    gives; it returns what to use in its place, or None."""
    blocks = list(enumerate(subject.model.model.layers))
    hooks = [
        block.mlp.act_fn.register_forward_hook(lambda _, __, out, layer=layer: function(layer, GATE, out))
        for layer, block in blocks
    ]
    try:
        with site_hooks(blocks, subject.family, function):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def histograms(subject: StockSubject, windows: Tensor) -> Thresholds:
    """The magnitudes at every site and gate over windows, int64 [N, S]."""
    found: dict[tuple[int, str], Tensor] = {}

    def count(layer: int, place: str, x: Tensor) -> None:
        counts = histogram.count(x[:, SINKS:].float().abs())
        found[layer, place] = found.get((layer, place), 0) + counts

    with watched(subject, count), progress("magnitudes", len(windows)) as advance:
        for ids in windows:
            subject.model.base_model(ids[None], use_cache=False)
            advance()
    return found


def thresholds_of(made: Thresholds, place: str, share: float) -> list[float]:
    """Of each layer the threshold that a share of the magnitudes passes."""
    layers = 1 + max(layer for layer, _ in made)
    return [histogram.quantile(made[layer, place], 1 - share) for layer in range(layers)]


def nll(subject: StockSubject, data: Windows, made: Thresholds, rule: str, share: float) -> Tensor:
    """The mean negative log-likelihood of each window, float64 [windows], where a rule leaves a share of neurons, or of
    columns, active."""
    sites = {GATE: (), BOTH: (MLP_MID,), COLUMNS: SITES}[rule]
    rules: Rules = {
        (layer, site): SiteRule(threshold, sparsity=1 - share)
        for site in sites
        for layer, threshold in enumerate(thresholds_of(made, site, share))
    }
    limits = thresholds_of(made, GATE, share)
    first = scored_from("decode", data[0].shape[1])

    def left_out(layer: int, place: str, x: Tensor) -> Tensor | None:
        if place != GATE:
            return None
        sparse = torch.arange(x.shape[1])[:, None] >= first
        return torch.where(sparse & (x.abs() <= limits[layer]), 0.0, x)

    scorer = SparseScorer(subject.model, subject.family, rules, subject.context)
    with watched(subject, left_out) if rule == GATE else nullcontext():
        scores = score_windows(scorer, *data, "decode")
    return scores.nll / scores.targets


def accuracy(subject: StockSubject, data: Windows, made: Thresholds, shares: Sequence[float]) -> list[dict[str, Any]]:
    """What each rule costs for each share: perplexity beside the dense one, paired by window."""
    dense = nll(subject, data, made, COLUMNS, 1.0)
    return [
        {
            "rule": rule,
            "share": share,
            "perplexity_ratio": exp_mean(nll(subject, data, made, rule, share) - dense),
            "dense": exp_mean(dense),
        }
        for rule in (BOTH, GATE, COLUMNS)
        for share in shares
    ]


Case = tuple[str, float]
"""A rule, and the share that it leaves active on the calibration text."""


@torch.inference_mode()
def activity(subject: StockSubject, windows: Tensor, made: Thresholds, cases: Sequence[Case]) -> dict[Case, list[Any]]:
    """Of each case and window, who is active: uint8 [tokens, layers, neurons]."""
    places = {rule: MLP_MID if rule == BOTH else rule for rule, _ in cases}
    limits = {case: thresholds_of(made, places[case[0]], case[1]) for case in cases}
    seen: dict[Case, list[Any]] = {case: [] for case in cases}
    with progress("who is active", len(windows)) as advance:
        for ids in windows:
            found: dict[Case, list[np.ndarray]] = {case: [] for case in cases}

            def look(layer: int, place: str, x: Tensor, into: Any = found) -> None:
                for case in cases:
                    if place == places[case[0]]:
                        into[case].append((x[0].abs() > limits[case][layer]).numpy())

            with watched(subject, look):
                subject.model.base_model(ids[None], use_cache=False)
            for case, layers in found.items():
                seen[case].append(np.stack(layers, 1).view(np.uint8))
            advance()
    return seen


def hottest(played: Played) -> str:
    """Which share of what is active is of the most active 10, 30 and 50 % of the neurons, in other text."""
    order = np.sort(played.frequency, axis=None)[::-1]
    return " / ".join(f"{order[: round(share * order.size)].sum() / order.sum():.3f}" for share in (0.1, 0.3, 0.5))


def smallest(rows: Sequence[Mapping[str, Any]], rule: str, limit: float) -> float:
    """The smallest measured share of a rule whose perplexity is no higher than `limit` times the dense one; all of the
    neurons, where none is."""
    good = [row["share"] for row in rows if row["rule"] == rule and row["perplexity_ratio"]["value"] <= limit]
    return min(good, default=1.0)


@click.command()
@click.option("--model", default=str(SHARED / "models" / "books-26m-silu"))
@click.option("--calibration-text", default=str(SHARED / "text" / "books.calibration.jsonl.xz"))
@click.option("--text", default=str(SHARED / "text" / "books.validation.jsonl.xz"))
@click.option("--share", default=0.5, help="Of the neurons, active by |silu(gate) up|; sets the accuracy to be met.")
@click.option("--shares", default="0.8,0.7,0.6,0.5", help="Whose accuracy is measured, for each rule.")
@click.option("--windows", default=8, help="Windows of the text whose second halves are scored, evenly spread.")
@click.option("--width", default=1024, help="Tokens of such a window.")
@click.option("--sessions", default=8)
@click.option("--tokens", default=2048, help="Of a session.")
@click.option("--prompt", default=256, help="Its first tokens.")
@click.option("--cached", default="0.1,0.2,0.3,0.5,0.7", help="Shares of the neurons with slots.")
@json_option
def main(
    model: str,
    calibration_text: str,
    text: str,
    share: float,
    shares: str,
    windows: int,
    width: int,
    sessions: int,
    tokens: int,
    prompt: int,
    cached: str,
    json_path: Path | None,
) -> None:
    """Print the tables for one model."""
    subject = open_subject(model)
    known, _ = session_windows(subject.tokenizer, read_text(calibration_text), tokens, sessions)
    unseen, _ = session_windows(subject.tokenizer, read_text(text), tokens, sessions)
    made = histograms(subject, known)
    data = windows_of(subject, text, windows, context=width)
    lost = accuracy(subject, data, made, [float(each) for each in shares.split(",")])
    click.echo(f"{len(data[0])} windows of {width}, second halves; dense {with_error(lost[0]['dense'], 2)}\n")
    click.echo(accuracy_table(lost))
    limit = next(row for row in lost if (row["rule"], row["share"]) == (BOTH, share))["perplexity_ratio"]["value"]
    equal = {rule: smallest(lost, rule, limit) for rule in (GATE, COLUMNS)}

    cases = [(BOTH, share), *((GATE, each) for each in sorted({share, equal[GATE]}))]
    before, sessions_of = (activity(subject, part, made, cases) for part in (known, unseen))
    hits, rows = [], []
    for rule, active in cases:
        frequency = np.mean([session[SINKS:].mean(0) for session in before[rule, active]], axis=0)
        played = Played(rule, active, frequency, sessions_of[rule, active], prompt)
        click.echo(
            f"\nactive by {rule}, {active:g}; density {played.density:.3f}; "
            f"the hottest 10 / 30 / 50 % are {hottest(played)} of what is active\n"
        )
        found = {(policy, at): played.outcome(policy, at) for policy in PLAYED for at in map(float, cached.split(","))}
        click.echo(hits_table(found))
        hits += [
            {"rule": rule, "share": active, "policy": policy, "cached": at, **each}
            for (policy, at), each in found.items()
        ]
        here = list(speeds(played, equal[COLUMNS]))
        click.echo(
            f"\ntokens a second; columns of all sites, {equal[COLUMNS]:g} of them active\n\n{speeds_table(here)}"
        )
        rows += here
    write_figures(json_path, {"accuracy": lost, "equal": equal, "hits": hits, "speeds": rows})


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each rule costs."""
    cells = [[row["rule"], f"{row['share']:g}", with_error(row["perplexity_ratio"], 4)] for row in rows]
    return markdown(Table(["active by", "share", "perplexity, x"], cells))


def hits_table(hits: Mapping[tuple[str, float], Mapping[str, Any]]) -> str:
    """Hit rates with their errors over sessions, and the neurons moved per token."""
    shares = list(dict.fromkeys(at for _, at in hits))
    cells = [
        [
            policy,
            *(
                with_error(hits[policy, at]["hit_rate"], 3)
                + (f" ({hits[policy, at]['moves']:.0f})" if hits[policy, at]["moves"] else "")
                for at in shares
            ),
        ]
        for policy in PLAYED
    ]
    return markdown(Table(["policy", *(f"{100 * at:g} %" for at in shares)], cells))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

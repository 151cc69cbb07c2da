"""Who is active, predicted: what predictors of equal memory find, and what a model is worth that believes them.

    python benchmarks/neuron_predictors.py [--model MODEL --calibration-text CAL --text TEXT] [--device cuda]

Without options it takes books-26m-relu and its texts from SPARSEPACK_SHARED. The predictors are those of
`gate_predictors.py`; ranks are the largest that take no more memory than the gate in two bits, or in one, and an eighth
of the model's width. Nine tenths of the calibration windows are what is trained and counted on. On the others each
predictor gets a threshold for each layer, such that it predicts `--times` as many neurons as are active.

Printed is for each of these budgets, with standard errors over windows of TEXT: which share of the active neurons is
predicted (recall); which share of the predicted ones is active (precision); how many are predicted, in active ones;
and how many times as high perplexity is, paired by window, when every position computes the predicted neurons only
(protocol `all`). Then a layer sees states that the layers before it have changed in the same way, and recall, precision
and counts are of these states; "undisturbed" is the recall on the states of the dense model. An adjacent predictor has
no layer before the first: there it looks at the token before, or ("first exact") the exact gate stands in for it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import Windows, windows_of
from books import books_options
from figures import json_option, write_figures
from gate_predictors import (
    Copied,
    ExactGate,
    Frequency,
    Predictor,
    Previous,
    Seen,
    principal,
    rank_within,
    seen,
    thresholds,
    trained,
)
from torch import Tensor, nn

from sparsepack.errors import UserError
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.scorer import SparseScorer
from sparsepack.eval.standard_error import exp_mean, mean, with_error
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.formats.codecs.gate_rows import copied
from sparsepack.models.family import MLP_MID
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.progress import progress
from sparsepack.tables import Table, markdown
from sparsepack.tracing.collect import DENSE

MLP_IN = "mlp_in"
SINKS = 4
"""First positions of a calibration window, from which nothing is learned."""
ROWS = 4
"""Windows at a time, where they are run to learn from them."""

Look = Callable[[int, Seen, Tensor], Tensor | None]
"""(layer, what a predictor may see, what enters the last matrix of the MLP) -> what to use in its place, or None."""


@dataclass(frozen=True)
class Fitted:
    """A predictor of one layer, and its threshold for each budget."""

    predictor: Predictor
    thresholds: Mapping[float, float]


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Moments of the optimiser become numbers so small that processors take several times as long for them."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@click.command()
@books_options
@click.option("--samples", default=80, help="Windows of the calibration, every tenth of them for thresholds.")
@click.option("--windows", default=12, help="Windows of the text, evenly spread.")
@click.option("--tokens", default=1024, help="Of a window.")
@click.option("--times", multiple=True, type=float, default=(1.0, 1.5, 2.0, 3.0), help="Predicted, in active ones.")
@click.option("--epochs", default=4, help="Of training.")
@click.option("--device", default="cpu")
@json_option
def main(
    model: str,
    calibration_text: str,
    text: str,
    samples: int,
    windows: int,
    tokens: int,
    times: tuple[float, ...],
    epochs: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the tables for one model."""
    subject = open_subject(model, None, device)
    began = time.time()
    learned, _ = windows_of(subject, calibration_text, samples, context=tokens)
    with denormals_flushed():
        layers = fit(subject, learned, times, epochs)
    spent = time.time() - began
    data = windows_of(subject, text, windows, context=tokens)
    dense, undisturbed = watch(subject, data, layers, times)
    click.echo(
        f"{subject.name}, {Path(text).name}: {len(dense)} windows of {tokens}, dense perplexity "
        f"{with_error(exp_mean(dense), 3)}; learned from {len(learned)} windows of {Path(calibration_text).name}, "
        f"trained for {epochs} epochs, in {spent:.0f} s. Computed in {subject.precision['dtype']} on {device}."
    )
    rows = []
    for budget in times:
        began = time.time()
        found = [
            {**masked(subject, data, layers, name, budget, dense), "undisturbed": undisturbed[name, budget]}
            for name in layers[0]
        ]
        click.echo(f"\n{budget:g} times as many as are active, {time.time() - began:.0f} s\n\n{_table(found)}")
        rows += found
    write_figures(json_path, {"dense_nll": dense.tolist(), "rows": rows})


def fit(subject: Subject, windows: Tensor, times: Sequence[float], epochs: int) -> list[dict[str, Fitted]]:
    """For each layer the predictors by their names, learned from the inputs of windows, int64 [N, S].

    One block of the model is in memory at a time. Raises `UserError` for a model that these predictors do not fit.
    """
    held = torch.arange(len(windows)) % 10 == 0
    windows = torch.cat([windows[~held], windows[held]])
    learned, held_back = slice(None, int((~held).sum())), slice(int((~held).sum()), None)
    stream = BlockStream(subject.source, subject.device, subject.dtype)
    hidden = stream.embed(windows).to(subject.device)
    before, layers = None, []
    with progress("learning", subject.source.layers) as advance:
        for layer in range(subject.source.layers):
            stream.load(layer)
            here, active = _through(stream, layer, hidden)
            gate = _gate(subject, stream.block, layer)
            told = seen(here, before, active)
            predictors = _predictors(gate, *_part(told, active, learned), epochs, first=before is None)
            layers.append(_with_thresholds(predictors, *_part(told, active, held_back), times))
            before = here
            advance()
    return layers


@torch.inference_mode()
def _through(stream: BlockStream, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Run the block on `hidden` [N, S, H], in place: what enters its MLP [N, S, d], and who is active [N, S, n]."""
    inputs: list[Tensor] = []
    active: list[Tensor] = []

    def record(_: int, site: str, x: Tensor) -> None:
        if site == MLP_IN:
            inputs.append(x.float())
        if site == MLP_MID:
            active.append(x != 0)

    with site_hooks([(layer, stream.block)], stream.source.family, record):
        for rows in torch.split(hidden, ROWS):
            rows.copy_(stream(rows))
    return torch.cat(inputs), torch.cat(active)


def _gate(subject: Subject, block: nn.Module, layer: int) -> Tensor:
    """The matrix whose rows say who is active, [n, d], as the model has it."""
    name = subject.family.projections[MLP_IN][0]
    if block.get_submodule(name).bias is not None:
        raise UserError(f"{subject.name}: its {name} has a bias, which these predictors leave out; expected none")
    return subject.source.tensor(f"model.layers.{layer}.{name}.weight").to(subject.device)


def _part(told: Seen, active: Tensor, rows: slice) -> tuple[Seen, Tensor]:
    """Some windows, without their first positions."""
    part = (rows, slice(SINKS, None))
    return Seen(told.here[part], told.before[part], told.active[part]), active[part]


def _predictors(gate: Tensor, told: Seen, active: Tensor, epochs: int, first: bool) -> dict[str, Predictor]:
    inputs = {False: told.here.flatten(0, 1), True: told.before.flatten(0, 1)}
    active = active.flatten(0, 1)
    frequency = Frequency(active.float().mean(0).half())
    copies = {bits: copied(gate, bits) for bits in (2, 1)}
    found: dict[str, Predictor] = {
        "exact gate": ExactGate(gate),
        "frequency": frequency,
        "previous token": Previous(frequency),
        "gate in 2 bits": Copied(copies[2]),
        "gate in 1 bit": Copied(copies[1]),
    }
    # Small models may have the same rank twice.
    ranks = list(dict.fromkeys([*(rank_within(copy.nbytes, gate) for copy in copies.values()), gate.shape[1] // 8]))
    for rank, reduced in zip(ranks, principal(gate, inputs[False], ranks), strict=True):
        found[f"gate of rank {rank}"] = reduced
        for name, adjacent in (("same layer", False), ("adjacent", True)):
            found[f"{name}, rank {rank}"] = trained(inputs[adjacent], active, rank, epochs, adjacent)
        found[f"adjacent, rank {rank}, first exact"] = found["exact gate" if first else f"adjacent, rank {rank}"]
    return found


def _with_thresholds(
    predictors: Mapping[str, Predictor], told: Seen, active: Tensor, times: Sequence[float]
) -> dict[str, Fitted]:
    if float(active.float().mean()) > DENSE:
        raise UserError(
            f"{float(active.float().mean()):.1%} of a block's neurons are active for a token; expected a model whose "
            "activation makes most of them zero, as ReLU does"
        )
    counts = [round(budget * int(active.sum())) for budget in times]
    return {
        name: Fitted(each, dict(zip(times, thresholds(each.scores(told), counts), strict=True)))
        for name, each in predictors.items()
    }


def watch(
    subject: Subject, data: Windows, layers: Sequence[Mapping[str, Fitted]], times: Sequence[float]
) -> tuple[Tensor, dict[tuple[str, float], dict[str, Any]]]:
    """The dense model: mean negative log-likelihood of each window, float64 [windows], and what every predictor finds
    with every budget."""
    counts: dict[tuple[str, float], list[Tensor]] = defaultdict(list)

    def look(layer: int, told: Seen, x: Tensor) -> None:
        for name, fitted in layers[layer].items():
            scores = fitted.predictor.scores(told)
            for budget in times:
                counts[name, budget].append(_counts(scores > fitted.thresholds[budget], x != 0))

    dense = _nll(subject, data, "dense", look)
    return dense, {pair: _figures(found, len(layers)) for pair, found in counts.items()}


def masked(
    subject: Subject, data: Windows, layers: Sequence[Mapping[str, Fitted]], name: str, budget: float, dense: Tensor
) -> dict[str, Any]:
    """What one predictor finds, and costs beside the dense model, where all other neurons are left out."""
    counts: list[Tensor] = []

    def look(layer: int, told: Seen, x: Tensor) -> Tensor:
        fitted = layers[layer][name]
        predicted = fitted.predictor.scores(told) > fitted.thresholds[budget]
        counts.append(_counts(predicted, x != 0))
        return torch.where(predicted, x, 0.0)

    ratio = exp_mean(_nll(subject, data, "all", look) - dense)
    return {
        "predictor": name,
        "bytes": layers[-1][name].predictor.nbytes,
        "times": budget,
        **_figures(counts, len(layers)),
        "perplexity_ratio": ratio,
    }


def _nll(subject: Subject, data: Windows, protocol: str, look: Look) -> Tensor:
    """Mean negative log-likelihood of each window, float64 [windows], while `look` sees, or changes, every MLP."""
    inputs: dict[int, Tensor] = {}

    def function(layer: int, site: str, x: Tensor) -> Tensor | None:
        if site == MLP_IN:
            inputs[layer] = x
        if site == MLP_MID:
            return look(layer, seen(inputs[layer], inputs.get(layer - 1), x != 0), x)
        return None

    scorer = SparseScorer(subject.model, subject.family, {}, subject.context)
    with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, function):
        scores = score_windows(scorer, *data, protocol)
    return scores.nll / scores.targets


def _counts(predicted: Tensor, active: Tensor) -> Tensor:
    """How many of one window are predicted and active, predicted, active: int64 [3]."""
    return torch.stack([(predicted & active).sum(), predicted.sum(), active.sum()]).cpu()


def _figures(counts: list[Tensor], layers: int) -> dict[str, Any]:
    """The figures of counts by layer, window after window; a window's layers are taken together."""
    by_window = torch.stack(counts).view(-1, layers, 3).double()
    both, predicted, active = by_window.sum(1).unbind(-1)
    of_layers = by_window.sum(0)
    return {
        "recall": mean(both / active),
        "precision": mean(both / predicted),
        "predicted": mean(predicted / active),
        "recall_by_layer": (of_layers[:, 0] / of_layers[:, 2]).tolist(),
        "active_by_layer": of_layers[:, 2].tolist(),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["predictor", "bytes a layer", "recall", "precision", "predicted", "perplexity, x", "recall, undisturbed"]
    cells = [
        [
            row["predictor"],
            f"{row['bytes']:,}",
            *(with_error(row[name], 4) for name in ("recall", "precision", "predicted", "perplexity_ratio")),
            with_error(row["undisturbed"]["recall"], 4),
        ]
        for row in rows
    ]
    return markdown(Table(head, cells))


if __name__ == "__main__":
    main()

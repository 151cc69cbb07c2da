"""`pack --kl` and `--loss`: how many bits a token may read so that no more is lost, on text that nothing else is judged
by.

Half of the windows that the calibration holds out, every second one, are for the search; the others stay for the score.
All thresholds of levels are multiples of one price (`calibrate.planes`), so that the search moves one number. The
logarithm of what is lost is nearly a straight line over that of the price: a few secants find it, kept between the
prices that were too low and too high. What counts is the loss and one standard error over windows, for few windows say
little.

A loss of perplexity is no more than half of the KL divergence either: text of which the model knows nothing loses no
perplexity where every other of the likeliest tokens is another one.
"""

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.errors import PackingError
from sparsepack.eval.perplexity import score_protocols, summarise
from sparsepack.eval.scorer import StreamedScorer
from sparsepack.formats.open import open_artifact
from sparsepack.formats.plan import Plan
from sparsepack.formats.table import format_of
from sparsepack.models.activity import skipped
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.sites import Rules
from sparsepack.models.tokenizer.windows import inputs_and_targets
from sparsepack.packing import PackRequest
from sparsepack.packing_score import scorers_of
from sparsepack.progress import say

MOST_TRIES = 8
NEAR = 0.95
"""The search ends where this part of what may be lost is lost, or more."""
_SLOPE = 1.5
"""Of the logarithm of what skipping loses over that of the price, before two points are known."""
_FURTHEST = 2.0
"""No step changes the logarithm of the price by more."""


def for_search(held_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The held-out windows [windows, context] on which bits are found, and those that stay for the score.

    Raises `PackingError` where there are fewer than two.
    """
    if held_out is None or len(held_out) < 2:
        raise PackingError(
            "--kl and --loss find the bits on windows that the calibration holds out: "
            f"{0 if held_out is None else len(held_out)}, expected 2 at least; calibrate again with --held-out 8"
        )
    return held_out[::2], held_out[1::2]


def with_goal(
    plan: Plan, thresholds: Thresholds, checkpoint: Checkpoint, request: PackRequest, windows: Tensor
) -> Thresholds:
    """The thresholds at which as much is lost as the request allows, with what was read on the windows.

    plan -- the artifact with `thresholds`, whose weights are scored; windows -- int32 [windows, context]

    Raises `PackingError` where more is lost with all bits read.
    """
    kind, most = request.goal
    with tempfile.TemporaryDirectory(dir=request.output.parent, prefix=f".{request.output.name}.goal-") as folder:
        path = Path(folder) / "model.gguf"
        plan.write(path)
        tried = _Tried(path, checkpoint, request.device, windows, kind)
        least = tried.lost({}, "dense")
        format = format_of(request.format)
        if least.value >= most:
            raise PackingError(
                f"{request.shown_goal}: with all {format.bits:g} bits of {format.name} read, {least.name} is "
                f"{least.value:.3g} already; expected more, or another format"
            )
        best, price = None, 0.0
        known: list[tuple[float, float]] = []
        for _ in range(MOST_TRIES):
            table = scaled(thresholds, math.exp(price))
            found = tried.lost(table.rules, "decode")
            lost, table = found.value + found.error, tried.realised(table)
            bits = format.bits * (1 - skipped_share(table))
            say(
                f"{bits:.2f} bits of a weight read: {found.name} {found.value:.3g} ± {found.error:.2g} on "
                f"{len(windows)} held-out windows"
            )
            if lost <= most and (best is None or price > best[0]):
                best = price, table
            if NEAR * most <= lost <= most:
                break
            known.append((price, math.log(max(lost - least.value, 1e-9 * most))))
            price = _next(known, math.log(max(most * (1 + NEAR), most + least.value) / 2 - least.value))
    if best is None:
        raise PackingError(f"{request.shown_goal}: not reached in {MOST_TRIES} tries; give --bits")
    return best[1]


def _next(known: list[tuple[float, float]], goal: float) -> float:
    """The price to try next, in logarithms: along the line through the last two points, or one of a usual slope; in
    the middle between one that was too low and one that was too high where the line leads out of there."""
    price, lost = known[-1]
    slope = _SLOPE
    if len(known) > 1 and known[-1][0] != known[-2][0]:
        slope = (lost - known[-2][1]) / (price - known[-2][0])
    step = (goal - lost) / min(max(slope, _SLOPE / 4), 4 * _SLOPE)
    found = price + min(max(step, -_FURTHEST), _FURTHEST)
    low = max((price for price, lost in known if lost <= goal), default=-math.inf)
    high = min((price for price, lost in known if lost > goal), default=math.inf)
    return found if low < found < high or not low < high else (low + high) / 2


def scaled(thresholds: Thresholds, factor: float) -> Thresholds:
    """The table at another price."""
    rules = {
        key: replace(rule, threshold=rule.threshold * factor) if rule.of_levels else rule
        for key, rule in thresholds.rules.items()
    }
    return replace(thresholds, rules=rules)


def skipped_share(table: Thresholds) -> float:
    """The share of all bits that is not read."""
    return skipped(table.weights, {key: rule.realised for key, rule in table.rules.items()}, ()).overall


@dataclass(frozen=True)
class _Lost:
    """What is lost, and its standard error: KL in nats, the share by which perplexity rises, or half of KL."""

    name: str
    value: float
    error: float


class _Tried:
    """An artifact whose rules change, beside its source."""

    def __init__(self, path: Path, checkpoint: Checkpoint, device: str, windows: Tensor, kind: str) -> None:
        self._stock, self._checkpoint, self._device = open_artifact(path).stock(), checkpoint, device
        self._data = inputs_and_targets(checkpoint.tokenizer, windows.long())
        self._kind = kind
        self._scorer: StreamedScorer | None = None

    def lost(self, rules: Rules, protocol: str) -> _Lost:
        """What is lost with these rules; of a loss of perplexity and half of KL the larger, errors included."""
        self._scorer, reference = scorers_of(self._stock, rules, self._checkpoint, self._device)
        scores = score_protocols(self._scorer, reference, *self._data, (protocol,))
        summary = summarise(scores[protocol], 1)
        kl, ratio = (
            (found["value"] or 0.0, found["stderr"] or 0.0)
            for found in (summary["kl_divergence"], summary["perplexity_ratio"])
        )
        if self._kind == "KL":
            return _Lost("KL", *kl)
        loss, half = _Lost("loss", ratio[0] - 1, ratio[1]), _Lost("half of KL", kl[0] / 2, kl[1] / 2)
        return max(loss, half, key=lambda lost: lost.value + lost.error)

    def realised(self, table: Thresholds) -> Thresholds:
        """The table with the shares of bits that were not read when it was last scored."""
        assert self._scorer is not None
        unread = self._scorer.realised()
        rules = {
            key: replace(rule, sparsity=unread[key], realised=unread[key]) if key in unread else rule
            for key, rule in table.rules.items()
        }
        made = replace(table, rules=rules)
        return replace(made, sparsity=skipped(made.weights, unread, made.sparse_sites).of_sparse_sites)

"""What packing lost: the finished artifact beside its source, on the windows that `calibrate` held out.

Two protocols over the same second halves of windows: `dense`, where nothing is skipped, and `decode`, whose scored
tokens skip and read what a decoded token does. How many windows are scored follows from the sizes of model and text,
not from a clock: equal inputs make equal bytes.
"""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsepack.calibrate.refitting import fitting_windows
from sparsepack.calibrate.thresholds import ALLOCATIONS, AllocationOptions, AttentionOptions
from sparsepack.eval.perplexity import score_protocols, summarise
from sparsepack.eval.scorer import StreamedScorer
from sparsepack.files.tensors import arithmetic, type_name
from sparsepack.formats.open import open_artifact
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import FORMATS, format_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import HEAD
from sparsepack.models.sites import Rules
from sparsepack.models.tokenizer.windows import inputs_and_targets, spread_windows
from sparsepack.packing import Found, PackRequest
from sparsepack.progress import duration

SECONDS = 60.0
"""Scoring may take so long, or a tenth of what searching thresholds and fitting weights takes if that is more."""
RATES: Mapping[str, float] = {"cpu": 3e10, "mps": 5e11, "cuda": 2e13}
"""Weights times tokens a second, by the kind of device: two cores, and a small part of a GPU's peak."""
READ_RATE = 2e8
"""Weights a second that are read from both models and decoded."""
FEWEST, SHORTEST = 4, 256
"""Windows are halved until so many fit, but not below so many tokens."""
WARN_FROM = 1.05
"""From this ratio of perplexities on a warning says what would bring most back."""

_FIGURES = ("perplexity_ratio", "kl_divergence", "top_token_agreement")
_FIGURE_DIGITS = 5
"""Figures are kept to so many digits: the last bits of a product depend on how many threads make it."""


class Scoring(NamedTuple):
    """The windows to score, int32 [windows, context], and about how long that takes; and why there are none, or what
    they leave unscored, in one line."""

    windows: Tensor | None
    reason: str | None = None
    seconds: float = 0.0


def scoring_of(checkpoint: Checkpoint, request: PackRequest, found: Found) -> Scoring:
    """Return what a request that asks for a score gets."""
    command = shlex.join(["sparsepack", "eval", str(request.output), "--perplexity"])
    command = f"`{command} TEXT {shlex.join(['--against', request.model])}`"
    if request.calibration is None:
        return Scoring(None, f"what packing lost is not scored without a calibration; measure it by {command}")
    if found.held_out is None or not len(found.held_out):
        return Scoring(
            None,
            f"what packing lost is not scored: {request.calibration} has no windows held out; calibrate again, or "
            f"measure it by {command}",
        )
    cost = cost_of(checkpoint, request, _skips(found), found.calibrated)
    context = found.held_out.shape[1]
    whole = found.attention.sparse.policy.min_context if found.attention else 0
    windows = pieces(found.held_out, cost.tokens, max(SHORTEST, 2 * whole))
    if len(windows):
        short = None
        if windows.shape[1] <= whole:
            longer = f"calibrate with a --context of {2 * whole:,}, or " if context <= whole else ""
            short = (
                f"what attention leaves out is not scored: of up to {whole:,} tokens (--min-context) all are read, and "
                f"windows have {windows.shape[1]:,}; {longer}measure it by {command}"
            )
        return Scoring(windows, short, cost.seconds(windows.numel()))
    return Scoring(
        None,
        f"what packing lost is not scored: a window of {context:,} tokens would take about "
        f"{duration(cost.seconds(context))}, more than {duration(cost.limit)}; measure it by {command}",
    )


class Cost(NamedTuple):
    """How long scoring takes, as predicted.

    limit   -- seconds that it may take
    reading -- seconds in which both models are read
    rate    -- tokens a second that pass through a whole model
    passes  -- of each token: through the source, and through the artifact under each protocol
    """

    limit: float
    reading: float
    rate: float
    passes: int

    @property
    def tokens(self) -> int:
        """Tokens of windows that can be scored within the limit."""
        return max(0, int((self.limit - self.reading) * self.rate / self.passes))

    def seconds(self, tokens: int) -> float:
        """Seconds in which so many tokens of windows are scored."""
        return self.reading + self.passes * tokens / self.rate


def cost_of(checkpoint: Checkpoint, request: PackRequest, skips: bool, calibrated: tuple[int, int]) -> Cost:
    """Return what scoring costs. skips: whether decoded tokens skip anything; calibrated: windows of the calibration,
    and positions in each."""
    shapes = {name: math.prod(shape) for name, shape in checkpoint.source.shapes.items()}
    weights = sum(size for name, size in shapes.items() if name != HEAD or not checkpoint.tied)
    rate = RATES[torch.device(request.device).type] / weights
    limit = max(SECONDS, _packing_tokens(checkpoint, request, calibrated) / rate / 10)
    return Cost(limit, weights / READ_RATE, rate, 3 if skips else 2)


def _skips(found: Found) -> bool:
    rules = found.thresholds.rules.values() if found.thresholds else ()
    return found.attention is not None or any(not rule.dense for rule in rules)


def pieces(held_out: Tensor, tokens: int, shortest: int = SHORTEST) -> Tensor:
    """Return windows of so many tokens in all, evenly spread over those held out: int64 [windows, context]. They are
    halved where fewer than `FEWEST` whole ones fit, down to `shortest`; and further where not one such fits."""
    context = held_out.shape[1]
    while (tokens // context < FEWEST and context // 2 >= shortest) or (tokens < context and context // 2 >= SHORTEST):
        context //= 2
    whole = held_out[:, : held_out.shape[1] // context * context].reshape(-1, context)
    return spread_windows(whole, tokens // context)


def _packing_tokens(checkpoint: Checkpoint, request: PackRequest, calibrated: tuple[int, int]) -> int:
    """Tokens that pass through the whole model until the matrices of an artifact are known, passes up to a site as
    parts of one. calibrated: windows of the calibration, and positions in each"""
    (count, context), fit, allocation = calibrated, request.fit, request.allocation
    tokens = 2 * math.prod(fitting_windows(checkpoint, fit, calibrated)) if fit.fits else 0
    if allocation is not None and allocation.sparsity > 0:
        tokens += min(allocation.windows, count) * context
        if ALLOCATIONS[allocation.allocation].trains:
            tokens += 3 * allocation.steps * allocation.batch * min(allocation.length, context)
    return tokens


def scorers_of(
    packed: StockModel, rules: Rules, checkpoint: Checkpoint, device: str
) -> tuple[StreamedScorer, StreamedScorer]:
    """Return the scorers of an artifact, with these rules of its sites, and of its source."""
    context, dtype = int(checkpoint.config.max_position_embeddings), arithmetic("auto", checkpoint.dtype, device)
    seen = (context, dtype, packed.inputs, packed.attention, device, packed.of_levels)
    return StreamedScorer(packed, rules, *seen), StreamedScorer(checkpoint, {}, context, dtype, device=device)


def score_artifact(path: Path, checkpoint: Checkpoint, windows: Tensor, device: str) -> dict[str, Any]:
    """Return the manifest's score of the artifact at `path`: `windows`, `context`, `source_perplexity`, and for
    `dense`, and `decode` where anything is skipped, `_FIGURES` with their standard errors over windows; a figure that
    is no finite number is None.

    Raises `ArtifactError` where the artifact is not what was written.
    """
    artifact = open_artifact(path)
    artifact.check_bytes()
    stock = artifact.stock()
    scorer, reference = scorers_of(stock, stock.rules, checkpoint, device)
    sparse = stock.attention is not None or any(not rule.dense for rule in stock.rules.values())
    inputs, targets = inputs_and_targets(checkpoint.tokenizer, windows.long())
    scores = score_protocols(scorer, reference, inputs, targets, ("dense", "decode") if sparse else ("dense",))
    found = {protocol: summarise(each, 1) for protocol, each in scores.items()}
    return {
        "windows": len(windows),
        "context": windows.shape[1],
        "source_perplexity": _rounded(found["dense"]["source_perplexity"]),
        **{
            protocol: {name: {key: _rounded(value) for key, value in figures[name].items()} for name in _FIGURES}
            for protocol, figures in found.items()
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_FIGURE_DIGITS}g}")


def warning_of(score: Mapping[str, Any], request: PackRequest, own: torch.dtype) -> str | None:
    """Return one line on a loss of 5 % of perplexity or more, with what would bring most back; None of a smaller one.

    own -- the type of the model's weights
    """
    dense, decode = (score[name]["perplexity_ratio"]["value"] if name in score else 1.0 for name in ("dense", "decode"))
    if dense is not None and decode is not None and max(dense, decode) < WARN_FROM:
        return None
    by_quantising = dense is None or (decode is not None and dense**2 >= decode)
    shown = " and ".join(
        f"{name} {_lost(ratio)}" for name, ratio in (("dense", dense), ("decode", decode)) if name in score
    )
    remedy = _finer(request, own) if by_quantising else _denser(request)
    return f"held-out text loses perplexity, {shown}: most of it by {remedy}"


def _lost(ratio: float | None) -> str:
    return "beyond all bounds" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _finer(request: PackRequest, own: torch.dtype) -> str:
    """What would bring most back of what is lost by quantising."""
    format = format_of(request.format)
    if format.fits and not request.fit.fits:
        return "rounding weights; take --quantiser gptq"
    stored = {"float16": "f16", "bfloat16": "bf16"}.get(type_name(own), "f32")
    exact = "slide-bf16" if format.weight_sparsity else stored
    if format.name == exact or FORMATS[exact].matrices.block == format.matrices.block:
        return "storing weights; see `sparsepack verify --against`"
    return f"quantising weights to {format.matrices.block}; take --format {exact}, or a larger model"


def _denser(request: PackRequest) -> str:
    """What would bring most back of what is lost by skipping."""
    allocation, attention = request.allocation, request.sparse_attention or AttentionOptions()
    if request.thresholds is not None:
        return f"what {request.thresholds} skips; take thresholds of a smaller --sparsity"
    if allocation is None or allocation.sparsity == 0:
        return f"tokens that attention does not read; take more than --tokens {attention.tokens}"
    if (format := format_of(request.format)).levels:
        if request.goal[1]:
            return f"leaving bits unread; take less than {request.shown_goal}"
        return f"leaving bits unread; take more --bits than {format.bits * (1 - allocation.sparsity):.3g}"
    smaller = f"a smaller --sparsity than {allocation.sparsity:g}"
    if ALLOCATIONS[allocation.allocation].trains:
        return f"skipping; take {'' if allocation.offsets else '--offsets, or '}{smaller}"
    best = AllocationOptions.allocation
    return f"skipping; take {'' if allocation.allocation == best else f'--allocation {best}, or '}{smaller}"

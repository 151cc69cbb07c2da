"""TEAL's block-wise greedy allocation (arXiv 2408.14690, section 4.3, algorithm 1), over sites.

Every block gets the same target. Within it, sparsity is handed out in small steps, each weighted by parameters and
given to the site where it hurts the block's output least. TEAL weights k and v of every model as an eighth of q;
here weights are the real parameter counts, and q, k, v (gate, up) share one site as SpQt runs them.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.folder import Calibration
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.records.rule import SiteKey, SiteRule
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.sparsity.allocation import rules_of_criterion
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.sparsity.sequential import Chooser, score, second_half
from sparsepack.workers.resume import ResumeState
from sparsepack.workers.workers import ALONE, Workers

STEP = 0.025
"""One greedy step makes this share of the block's weights sparse."""
_WINDOWS, _TOKENS = 2, 512
HIGHEST = 0.95
"""A site has at most this sparsity, unless the target itself is higher."""


def greedy_sparsities(
    stream: BlockStream,
    layer: int,
    hidden: torch.Tensor,
    weights: Mapping[SiteKey, float],
    target: float,
    base: Mapping[str, SiteRule],
    workers: Workers = ALONE,
) -> dict[str, float]:
    """Sparsity of each site of the loaded block, target on average by parameters.

    hidden  -- [N, S, H], what enters the block (upstream sparse)
    weights -- shares of the parameters, of the sites that may be sparse
    base    -- channel weights of the criterion, by site
    workers -- who try the steps together
    """
    sites = [site for site in SITES if (layer, site) in weights]
    total = sum(weights[layer, site] for site in sites)
    highest = max(HIGHEST, target)
    reference = run_at(stream, layer, hidden, dict.fromkeys(SITES, 0.0), base)
    given = dict.fromkeys(SITES, 0.0)
    spent = 0.0
    while spent < target - 1e-9:
        step = min(STEP, target - spent)
        trials = [
            (site, {**given, site: min(given[site] + step * total / weights[layer, site], highest)})
            for site in sites
            if given[site] < highest
        ]

        def error(trial: tuple[str, dict[str, float]]) -> float:
            return float(second_half(run_at(stream, layer, hidden, trial[1], base) - reference).norm())

        errors = workers.each(trials, error)
        _, _, given = min((each, *trial) for each, trial in zip(errors, trials, strict=True))
        spent = sum(given[site] * weights[layer, site] for site in sites) / total
    return given


def run_at(
    stream: BlockStream,
    layer: int,
    hidden: torch.Tensor,
    sparsities: Mapping[str, float],
    base: Mapping[str, SiteRule],
) -> torch.Tensor:
    """The loaded block's output [N, S, H] with thresholds taken from this very input, upstream sites sparse."""

    def function(_: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        if sparsities[site] == 0:
            return None
        scores = score(second_half(x), base[site])
        threshold = histogram.quantile(histogram.count(scores).cpu(), sparsities[site])
        sparse = torch.where(scores > threshold, second_half(x), 0)
        return torch.cat([x[:, : x.shape[1] // 2], sparse], 1)

    with site_hooks([(layer, stream.block)], stream.source.family, function):
        return stream(hidden)


def chooser(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    resume: ResumeState,
) -> Chooser:
    """Block after block, the greedy allocation of the sites in `weights`."""
    return _Greedy(calibration, options, weights, resume)


class _Greedy:
    """TEAL's choices, block after block; keeps its own hidden states of a few short windows, also on disk."""

    def __init__(
        self,
        calibration: Calibration,
        options: AllocationOptions,
        weights: Mapping[SiteKey, float],
        resume: ResumeState,
    ) -> None:
        self.options, self.weights, self.resume = options, weights, resume
        self.ids = spread_windows(calibration.windows, _WINDOWS)[:, :_TOKENS]
        self.hidden: torch.Tensor | None = None

    def __call__(self, layer: int, stream: BlockStream) -> dict[str, SiteRule]:
        base = rules_of_criterion(stream, self.options.criterion)
        if self.hidden is None:
            self.hidden = self.resume.hidden("greedy")
        if self.hidden is None:
            self.hidden = stream.embed(self.ids)
        given = dict.fromkeys(SITES, 0.0)
        if any((layer, site) in self.weights for site in SITES):
            target, workers = self.options.sparsity, self.resume.workers
            given = greedy_sparsities(stream, layer, self.hidden, self.weights, target, base, workers)
        upstream = given if self.options.upstream == "sparse" else dict.fromkeys(SITES, 0.0)
        self.hidden = run_at(stream, layer, self.hidden, upstream, base)
        self.resume.keep_hidden(self.hidden, "greedy")
        return {site: replace(base[site], sparsity=given[site]) for site in SITES}

"""`thresholds`: from a calibration and a target to a thresholds table, by one of the allocations."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from sparsepack import __version__
from sparsepack.calibrate.collectors import histogram
from sparsepack.calibrate.criteria import channel_weights
from sparsepack.calibrate.folder import Calibration
from sparsepack.files.hashing import fingerprint
from sparsepack.files.resume import Unfinished
from sparsepack.models.blocks import BlockStream
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.windows import spread_windows
from sparsepack.sparsity.allocation import AllocationOptions, SiteChoice, SiteKey, sparse_sites, weights_of
from sparsepack.sparsity.learned import chosen_sites, learn_choices
from sparsepack.sparsity.sequential import Chooser, finished_rows, row_tensors, sequential_thresholds
from sparsepack.sparsity.teal import greedy_sparsities, run_at
from sparsepack.sparsity.thresholds import SiteThreshold, Thresholds

_GREEDY_WINDOWS, _GREEDY_TOKENS = 2, 512
_BATCH = 2


def find_thresholds(
    checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions, state: Path | None = None
) -> Thresholds:
    """A thresholds table whose realised sparsity is the target on text of the calibration's kind.

    state -- folder from which a run that was killed goes on; the caller removes it once the table is written

    Raises `ThresholdsError` for options out of range, `CalibrationError` for a calibration of another model and
    `OutputError` where the disk refuses the state.
    """
    options.check()
    calibration.check_model(checkpoint)
    sites = sparse_sites(checkpoint, options.include, options.ignore)
    weights = weights_of(checkpoint, sites)
    unfinished = Unfinished(state, _mark(checkpoint, calibration, options))
    if options.sparsity == 0:
        rows = [SiteThreshold(layer, site, 0.0, 0.0, 0.0) for layer in range(checkpoint.layers) for site in SITES]
    elif options.allocation == "global":
        learnt = learn_choices(checkpoint, calibration, options, weights, unfinished)
        learnt_choices: Chooser = lambda layer, _: chosen_sites(learnt, layer, SITES)  # noqa: E731
        rows = _sequential(checkpoint, calibration, options, learnt_choices, unfinished)
    else:
        teal = options.allocation == "teal"
        choose = _Greedy(calibration, options, weights, unfinished) if teal else _uniform(options, weights)
        take = _from_histograms if options.upstream == "dense" else _sequential
        rows = take(checkpoint, calibration, options, choose, unfinished)
    return Thresholds(
        model_sha256=checkpoint.sha256,
        calibration_sha256=calibration.sha256,
        allocation=options.allocation,
        criterion=options.criterion,
        sparsity=options.sparsity,
        upstream=options.upstream,
        rows=tuple(rows),
    )


def _mark(checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions) -> str:
    hashes = {"model": checkpoint.sha256, "calibration": calibration.sha256}
    return fingerprint({"sparsepack": __version__, **hashes, "options": asdict(options)})


def _stream(checkpoint: Checkpoint, options: AllocationOptions) -> BlockStream:
    return BlockStream(checkpoint, options.device, getattr(torch, options.dtype))


@torch.no_grad()
def _sequential(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    unfinished: Unfinished,
) -> list[SiteThreshold]:
    windows = spread_windows(calibration.windows, options.windows)
    return sequential_thresholds(_stream(checkpoint, options), windows, choose, _BATCH, unfinished)


@torch.no_grad()
def _from_histograms(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    unfinished: Unfinished,
) -> list[SiteThreshold]:
    """Thresholds from the calibration's own counts: everything upstream dense, as the papers take them."""
    stream, rows = _stream(checkpoint, options), finished_rows(unfinished)
    for layer in range(len(rows) // len(SITES), checkpoint.layers):
        stream.load(layer)
        found = []
        for site, choice in choose(layer, stream).items():
            counts = calibration.layers[layer].sites[site].histograms[options.criterion]
            threshold = histogram.quantile(counts, choice.sparsity)
            realised = histogram.share_at_most(counts, threshold) if choice.sparsity else 0.0
            c = choice.channel_weights if choice.sparsity else None
            found.append(SiteThreshold(layer, site, choice.sparsity, threshold, realised, c))
        rows += found
        unfinished.save_block(layer, row_tensors(found))
    return rows


def _criterion_choices(stream: BlockStream, criterion: str) -> dict[str, SiteChoice]:
    """The criterion's channel weights for each site of the loaded block, at no sparsity yet."""
    names = stream.checkpoint.family.projections
    choices = {}
    for site in SITES:
        c = channel_weights(criterion, stream.block, names[site])
        choices[site] = SiteChoice(0.0, None if c is None else c.cpu())
    return choices


def _with_sparsity(choice: SiteChoice, sparsity: float) -> SiteChoice:
    return SiteChoice(sparsity, choice.channel_weights, choice.offset)


def _uniform(options: AllocationOptions, weights: Mapping[SiteKey, float]) -> Chooser:
    def choose(layer: int, stream: BlockStream) -> dict[str, SiteChoice]:
        base = _criterion_choices(stream, options.criterion)
        return {s: _with_sparsity(base[s], options.sparsity if (layer, s) in weights else 0.0) for s in SITES}

    return choose


class _Greedy:
    """TEAL's choices, block after block; keeps its own hidden states of a few short windows, also on disk."""

    def __init__(
        self,
        calibration: Calibration,
        options: AllocationOptions,
        weights: Mapping[SiteKey, float],
        unfinished: Unfinished,
    ) -> None:
        self.options, self.weights, self.unfinished = options, weights, unfinished
        self.ids = spread_windows(calibration.windows, _GREEDY_WINDOWS)[:, :_GREEDY_TOKENS]
        self.hidden: torch.Tensor | None = None

    def __call__(self, layer: int, stream: BlockStream) -> dict[str, SiteChoice]:
        base = _criterion_choices(stream, self.options.criterion)
        if self.hidden is None:
            self.hidden = self.unfinished.load(f"greedy-{layer:05}")["hidden"] if layer else stream.embed(self.ids)
        given = dict.fromkeys(SITES, 0.0)
        if any((layer, site) in self.weights for site in SITES):
            given = greedy_sparsities(stream, layer, self.hidden, self.weights, self.options.sparsity, base)
        upstream = given if self.options.upstream == "sparse" else dict.fromkeys(SITES, 0.0)
        self.hidden = run_at(stream, layer, self.hidden, upstream, base)
        # These count once the block is committed; until then those before it do.
        self.unfinished.keep(f"greedy-{layer + 1:05}", {"hidden": self.hidden})
        self.unfinished.drop(f"greedy-{layer - 1:05}")
        return {site: _with_sparsity(base[site], given[site]) for site in SITES}

"""From a calibration and a target to a thresholds table, by one of the allocations."""

from collections.abc import Collection
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.provenance import processor
from sparsepack.calibrate.sequential import (
    Chooser,
    at_quantile,
    finished_rules,
    rules_of_block,
    save_rules,
    sequential_thresholds,
)
from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.calibrate.thresholds import ALLOCATIONS, AllocationOptions
from sparsepack.calibrate.training import check_share
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import ThresholdsError
from sparsepack.files.atomic import check_output
from sparsepack.files.hashing import NO_HASH, fingerprint
from sparsepack.files.tensors import arithmetic
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.family import MLP_SITES, SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import Forecast, forecast_blocks
from sparsepack.models.sites import CURVE_SHARES, Rules, SiteKey, SiteRule, chosen_sites
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.version import __version__
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.resume import ResumeState, state_beside
from sparsepack.workers.workers import ALONE, Workers

BATCH = 2
"""This many windows are run at a time."""
_TYPICAL = 0.12345678901234567  # a threshold as long as most, for the manifest's table
_TYPICAL_IN_CURVE = 0.12345


def make_thresholds(
    model: Checkpoint | str | Path,
    calibration: Path,
    options: AllocationOptions,
    output: Path,
    overwrite: bool = False,
    workers: Workers = ALONE,
) -> Thresholds:
    """`thresholds`: find a table and write it. A run that was killed goes on where it stopped.

    calibration -- the folder; output -- the table to make, refused before any work where it cannot be
    workers     -- who do it together, with the same bytes as one alone; the first one writes the table

    Raises as `find_thresholds`, and `UserError` subclasses for what cannot be read or written.
    """
    options.check()
    if workers.first:
        check_output(output, overwrite)
    checkpoint = checkpoint_of(model)
    read = checkpoint.source.hash.share_beside(workers, lambda: load_calibration(calibration))
    with state_beside(output, workers) as state:
        table = find_thresholds(checkpoint, read, options, state, workers)
        if workers.first:
            table.write(output, overwrite)
        return table


def find_thresholds(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    state: Path | None = None,
    workers: Workers = ALONE,
) -> Thresholds:
    """A thresholds table whose realised sparsity is the target on text of the calibration's kind.

    state -- folder from which a run that was killed goes on; the caller removes it once the table is written

    Raises `ThresholdsError` for options out of range, `CalibrationError` for a calibration of another model,
    `OutputError` where the disk refuses the state, and `WorkersError` or `WorkerLost` of workers.
    """
    options.check()
    check_experts(checkpoint, options)
    calibration.check_model(checkpoint)
    dealt = Dealt(workers, min(options.windows, len(calibration.windows)), BATCH)
    if ALLOCATIONS[options.allocation].trains:
        check_share(workers, options.batch)
    if options.upstream == "sparse" and options.sparsity > 0:
        dealt.check("--windows")
    command = _fingerprint(checkpoint, calibration, options)
    hashes = {"model": checkpoint.sha256, "calibration": calibration.sha256}
    workers.agree({**hashes, "processor": processor(options.device), "command": command})
    sites = chosen_sites(checkpoint.layers, options.include, options.ignore)
    weights = weights_of(checkpoint, sites)
    resume = ResumeState(state, command, checkpoint.layers, workers)
    rules: Rules
    if options.sparsity == 0:
        rules = {(layer, site): SiteRule() for layer in range(checkpoint.layers) for site in SITES}
    else:
        module = import_module(ALLOCATIONS[options.allocation].module)
        choose = module.chooser(checkpoint, calibration, options, weights, resume)
        if options.upstream == "dense":
            rules = _from_histograms(checkpoint, calibration, options, choose, resume)
        else:
            rules = _sequential(checkpoint, calibration, options, choose, resume, dealt)
    return _table(checkpoint, calibration.sha256, options, rules, sites)


def predicted_thresholds(checkpoint: Checkpoint, options: AllocationOptions) -> Thresholds:
    """A table as long as the one that will be found, with vectors where there will be vectors: what is known of it
    before anything is run.

    Raises `SiteError` for a pattern that matches no site, `ThresholdsError` for options that a model with experts
    cannot have.
    """
    check_experts(checkpoint, options)
    row = ALLOCATIONS[options.allocation]
    per_channel = row.per_channel or options.criterion != "magnitude"
    rules = {(layer, site): SiteRule() for layer in range(checkpoint.layers) for site in SITES}
    sites = chosen_sites(checkpoint.layers, options.include, options.ignore)
    pooled = checkpoint.family.experts is not None
    for layer, site in sites if options.sparsity else ():
        columns = checkpoint.stacked_shape(site, layer)[1]
        rules[layer, site] = SiteRule(
            threshold=_TYPICAL,
            offset=torch.zeros(columns) if options.offsets else None,
            channel_weights=None if not per_channel or (pooled and site in MLP_SITES) else torch.ones(columns),
            sparsity=options.sparsity,
            realised=_TYPICAL,
            curve=(_TYPICAL_IN_CURVE,) * len(CURVE_SHARES),
        )
    return _table(checkpoint, NO_HASH, options, rules, sites)


def check_experts(checkpoint: Checkpoint, options: AllocationOptions) -> None:
    """Raise `ThresholdsError` for options that a model cannot have whose MLPs have experts: thresholds of mlp_mid are
    pooled over them, channel by channel they have nothing in common."""
    if checkpoint.family.experts is None or options.sparsity == 0:
        return
    row = ALLOCATIONS[options.allocation]
    per_channel = row.per_channel and not row.with_experts
    if per_channel or options.criterion != "magnitude":
        what, instead = ("allocation", "fisher, uniform or teal") if per_channel else ("criterion", "magnitude")
        raise ThresholdsError(
            f"{checkpoint.name}: {what} {getattr(options, what)} has a weight for each channel, and thresholds are "
            f"pooled over the experts of a block, whose channels have nothing in common; use {instead}"
        )


def _table(
    checkpoint: Checkpoint, calibration: str, options: AllocationOptions, rules: Rules, sites: Collection[SiteKey]
) -> Thresholds:
    """calibration -- its hash; sites -- those that may be sparse"""
    return Thresholds(
        model_sha256=checkpoint.sha256,
        calibration_sha256=calibration,
        allocation=options.allocation,
        criterion=options.criterion,
        sparsity=options.sparsity,
        upstream=options.upstream,
        rules=rules,
        weights={(layer, site): checkpoint.token_weights(site, layer) for layer, site in rules},
        sparse_sites=frozenset(sites),
        of_bases=len(checkpoint.bases) * int(checkpoint.config.hidden_size) ** 2,
    )


def _fingerprint(checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions) -> str:
    hashes = {"model": checkpoint.sha256, "calibration": calibration.sha256}
    asked = asdict(options) | {"device": torch.device(options.device).type}  # on which card of several does not matter
    return fingerprint({"sparsepack": __version__, **hashes, "options": asked})


def block_stream(checkpoint: Checkpoint, options: AllocationOptions) -> BlockStream:
    """The blocks of a model where and as they are run."""
    return BlockStream(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))


@torch.no_grad()
def _sequential(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    resume: ResumeState,
    dealt: Dealt,
) -> dict[SiteKey, SiteRule]:
    windows = spread_windows(calibration.windows, options.windows)
    return sequential_thresholds(block_stream(checkpoint, options), windows, choose, resume, dealt)


@torch.no_grad()
def _from_histograms(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    resume: ResumeState,
) -> dict[SiteKey, SiteRule]:
    """Thresholds from the calibration's own counts: everything upstream dense, as the papers take them."""
    stream, rules = block_stream(checkpoint, options), finished_rules(resume)
    for layer in range(len(rules) // len(SITES), checkpoint.layers):
        stream.load(layer)
        for site, choice in choose(layer, stream).items():
            counts = calibration.layers[layer][f"{site}.histogram.{options.criterion}"]
            rules[layer, site] = at_quantile(choice, counts) if choice.sparsity else SiteRule()
        save_rules(resume, layer, rules)
    return rules


@torch.no_grad()
def forecast(
    model: Checkpoint | str | Path, calibration: Path, options: AllocationOptions, workers: int = 1
) -> Forecast:
    """What `thresholds` would take with so many workers like this process; nothing is written.

    Raises as `make_thresholds` does, also where a worker would have nothing to do, and `ThresholdsError` where not each
    block is run by itself: an allocation that trains, thresholds from a calibration's counts, a sparsity of 0.
    """
    options.check()
    if ALLOCATIONS[options.allocation].trains:
        raise ThresholdsError(
            f"--dry-run: allocation {options.allocation} trains the whole model, whose blocks cannot be measured one "
            "by one; start it: it says what is left after its first steps"
        )
    if options.upstream == "dense" or options.sparsity == 0:
        raise ThresholdsError(
            f"--dry-run: upstream {options.upstream} at sparsity {options.sparsity:g} runs no text through the blocks, "
            "and takes as long as reading does"
        )
    checkpoint = checkpoint_of(model, hashed=False)
    read = load_calibration(calibration)
    read.check_model(checkpoint)
    windows = spread_windows(read.windows, options.windows)
    dealt = Dealt(Workers(0, workers), len(windows), BATCH)
    dealt.check("--windows")
    weights = weights_of(checkpoint, chosen_sites(checkpoint.layers, options.include, options.ignore))
    choose = import_module(ALLOCATIONS[options.allocation].module).chooser(
        checkpoint, read, options, weights, ResumeState(None, "")
    )
    stream = block_stream(checkpoint, options)

    def run_block(hidden: Tensor, parts: Dealt) -> None:
        rules_of_block(stream, 0, hidden, choose, parts, lambda steps=1: None)

    return forecast_blocks(checkpoint, stream, windows, dealt, run_block)

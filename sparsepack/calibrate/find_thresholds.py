"""From a calibration and a target to a thresholds table, by one of the allocations."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibrate import planes
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.provenance import processor
from sparsepack.calibrate.sequential import Chooser, at_quantile, rules_of_block, sparse_second_half
from sparsepack.calibrate.threshold_table import Thresholds, rules_of_json, rules_to_json
from sparsepack.calibrate.thresholds import ALLOCATIONS, AllocationOptions, ThresholdsOptions
from sparsepack.calibrate.training import check_share, kept_at, trainer
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import ThresholdsError
from sparsepack.files.atomic import check_output
from sparsepack.files.hashing import NO_HASH, fingerprint
from sparsepack.files.tensors import arithmetic
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.family import MLP_MID
from sparsepack.models.hf_config import expert_numbers
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import Forecast, bound_line, forecast_blocks
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.sites import CURVE_SHARES, Rules, SiteKey, SiteRule, chosen_sites
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import Advance, Shorter
from sparsepack.version import __version__
from sparsepack.workers.shard import ALONE, Shard

BATCH = 2
"""This many windows are run at a time."""
_CARRIED = "greedy"
"""Under this name is kept what an allocation carries from block to block."""
_TYPICAL = 0.12345678901234567  # a threshold as long as most, for the manifest's table
_TYPICAL_IN_CURVE = 0.12345


def make_thresholds(
    model: Checkpoint | str | Path,
    calibration: Path,
    options: AllocationOptions,
    output: Path,
    overwrite: bool = False,
    shard: Shard = ALONE,
) -> Thresholds:
    """`thresholds`: find a table and write it. A run that was killed goes on where it stopped.

    calibration -- the folder; output -- the table to make, refused before any work where it cannot be
    shard       -- this worker's of several, who do it together with the same bytes as one alone; the first one writes
                   the table

    Raises as `find_thresholds`, and `UserError` subclasses for what cannot be read or written.
    """
    options = _settled(options)
    if shard.first:
        check_output(output, overwrite)
    checkpoint = checkpoint_of(model)
    read = checkpoint.source.hash.share_beside(shard.all_gather, lambda: load_calibration(calibration))
    with shard.saved_beside(output) as shard:
        table = find_thresholds(checkpoint, read, options, shard)
        if shard.first:
            table.write(output, overwrite)
        return table


def _settled(options: AllocationOptions) -> AllocationOptions:
    """Checked options, of which it is known whether levels are to be found."""
    if isinstance(options, ThresholdsOptions):
        return options.settled()
    options.check()
    return options


def find_thresholds(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    shard: Shard = ALONE,
) -> Thresholds:
    """A thresholds table whose realised sparsity is the target on text of the calibration's kind.

    shard -- whose folder has the state from which a run that was killed goes on

    Raises `ThresholdsError` for options out of range, `CalibrationError` for a calibration of another model,
    `OutputError` where the disk refuses the state, and `WorkersError` or `WorkerLost` of workers.
    """
    options.check()
    check_experts(checkpoint, options)
    calibration.check_model(checkpoint)
    shard = shard.split(min(options.windows, len(calibration.windows)), BATCH)
    if ALLOCATIONS[options.allocation].trains:
        check_share(shard.world_size, options.batch)
    if options.upstream == "sparse" and options.sparsity > 0:
        shard.check("--windows")
    command = _fingerprint(checkpoint, calibration, options)
    hashes = {"model": checkpoint.sha256, "calibration": calibration.sha256}
    sites = chosen_sites(checkpoint.sites, options.include, options.ignore)
    shard.agree({**hashes, "processor": processor(options.device), "command": command})
    weights = weights_of(checkpoint, sites)
    shard = shard.resume(command, checkpoint.layers)
    rules: Rules
    if options.sparsity == 0 or options.block:
        rules = {key: SiteRule() for key in checkpoint.sites}
        if options.sparsity:
            rules |= planes.find_rules(checkpoint, calibration, options, weights)
    else:
        carried = shard.broadcast_tensors(shard.kept_after(_CARRIED))
        choose = _chooser(checkpoint, calibration, options, weights, carried, shard)
        run = _from_histograms if options.upstream == "dense" else _sequential
        rules = run(checkpoint, calibration, options, choose, carried, shard)
    return _table(checkpoint, calibration.sha256, options, rules, sites)


def predicted_thresholds(checkpoint: Checkpoint, options: AllocationOptions) -> Thresholds:
    """A table as long as the one that will be found, with vectors where there will be vectors: what is known of it
    before anything is run.

    Raises `SiteError` for a pattern that matches no site, `ThresholdsError` for options that a model with experts
    cannot have.
    """
    check_experts(checkpoint, options)
    row = ALLOCATIONS[options.allocation]
    each = row.per_channel or options.criterion != "magnitude"
    rules = {key: SiteRule() for key in checkpoint.sites}
    sites = chosen_sites(checkpoint.sites, options.include, options.ignore)
    for layer, site in sites if options.sparsity else ():
        of_experts = checkpoint.family.of_experts(layer, site)
        columns = checkpoint.stacked_shape(site, layer)[1]
        rules[layer, site] = SiteRule(
            threshold=_TYPICAL,
            offset=torch.zeros(columns) if options.offsets else None,
            channel_weights=_predicted_weights(checkpoint, (layer, site), options, each and not of_experts),
            sparsity=options.sparsity,
            realised=_TYPICAL,
            curve=(_TYPICAL_IN_CURVE,) * len(CURVE_SHARES),
            steps=torch.ones(len(BLOCKS[options.block].levels)) if options.block else None,
        )
    return _table(checkpoint, NO_HASH, options, rules, sites)


def _predicted_weights(
    checkpoint: Checkpoint, key: SiteKey, options: AllocationOptions, per_channel: bool
) -> Tensor | None:
    (layer, site), experts = key, expert_numbers(checkpoint.config, key[0])
    columns = checkpoint.stacked_shape(site, layer)[1]
    if options.block and experts is not None and site == MLP_MID:
        return torch.ones(experts.stored, columns)
    return torch.ones(columns) if options.block or per_channel else None


def check_experts(checkpoint: Checkpoint, options: AllocationOptions) -> None:
    """Raise `ThresholdsError` for options that a model cannot have whose MLPs have experts: thresholds of mlp_mid are
    pooled over them, channel by channel they have nothing in common."""
    if not any(map(checkpoint.family.experts_of, range(checkpoint.layers))) or options.sparsity == 0:
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
        has_row=checkpoint.family.uniform,
    )


def _fingerprint(checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions) -> str:
    hashes = {"model": checkpoint.sha256, "calibration": calibration.sha256}
    asked = asdict(options) | {"device": torch.device(options.device).type}  # on which card of several does not matter
    return fingerprint({"sparsepack": __version__, **hashes, "options": asked})


def block_stream(checkpoint: Checkpoint, options: AllocationOptions) -> BlockStream:
    """The blocks of a model where and as they are run."""
    return open_blocks(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))


def _chooser(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    carried: dict[str, Tensor],
    shard: Shard,
) -> Chooser:
    """What gives each block's sites their targets by the allocation; rules that it finds before are kept in the state.

    weights -- shares of the parameters, of the sites that may be sparse; the others stay dense
    """
    row, state = ALLOCATIONS[options.allocation], shard.state
    module = import_module(row.module)
    if not row.at_once:
        chooser: Chooser = module.chooser(calibration, options, weights, shard.each, carried)
        return chooser
    if row.name in state.parts:
        found = rules_of_json(state.parts[row.name]["rules"], str(state.path), checkpoint.family.uniform)
    else:
        found = module.find_rules(checkpoint, calibration, options, weights, trainer(shard, options), shard.each)
        state.drop(kept_at(options.steps))  # of the training, if there was one
        state.commit(row.name, rules=rules_to_json(found))
    sites = checkpoint.family.projections_of
    return lambda layer, _: {site: found.get((layer, site), SiteRule()) for site in sites(layer)}


@torch.no_grad()
def _sequential(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    carried: Mapping[str, Tensor],
    shard: Shard,
) -> Rules:
    """Thresholds that realise each site's target on windows of the calibration, everything upstream sparse by them. Now
    and then the rules of all blocks and the hidden states are saved."""
    stream = block_stream(checkpoint, options)
    windows = spread_windows(calibration.windows, options.windows)
    rules, hidden = finished_rules(shard, checkpoint.family.uniform), stream.states(shard.own(windows), shard.hidden())
    shorter, bound = Shorter("--windows", len(windows)), partial(bound_line, stream)
    with shard.blocks("thresholds", shard.runs, shard.runs, shorter, bound) as (unfinished, advance):
        for layer in unfinished:
            stream.load(layer)
            rules |= _run_block(stream, layer, hidden, choose, shard, advance)
            shard.keep_after(_CARRIED, carried)
            shard.save_block(layer, {}, hidden, rules=rules_to_json(rules))
    return rules


def _run_block(
    stream: BlockStream, layer: int, hidden: Tensor, choose: Chooser, shard: Shard, advance: Advance
) -> dict[SiteKey, SiteRule]:
    """The rules of the loaded block's sites; the states that enter it become those that leave it, sparse by them."""
    rules = rules_of_block(stream, layer, torch.split(hidden, shard.batch), choose(layer, stream), shard.all_reduce)
    with sparse_second_half(stream, layer, rules):
        stream.pass_on(hidden, shard.batch, shard.after_each(advance))
    return rules


@torch.no_grad()
def _from_histograms(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    choose: Chooser,
    carried: Mapping[str, Tensor],
    shard: Shard,
) -> Rules:
    """Thresholds from the calibration's own counts: everything upstream dense, as the papers take them."""
    stream, rules = block_stream(checkpoint, options), finished_rules(shard, checkpoint.family.uniform)
    for layer in range(shard.done, checkpoint.layers):
        stream.load(layer)
        for site, choice in choose(layer, stream).items():
            counts = calibration.layers[layer][f"{site}.histogram.{options.criterion}"]
            rules[layer, site] = at_quantile(choice, counts) if choice.sparsity else SiteRule()
        shard.keep_after(_CARRIED, carried)
        shard.save_block(layer, {}, rules=rules_to_json(rules))
    return rules


def finished_rules(shard: Shard, has_row: bool = True) -> dict[SiteKey, SiteRule]:
    """The rules of all sites of the finished blocks."""
    return rules_of_json(shard.value("rules", []), str(shard.state.path), has_row)


@torch.no_grad()
def forecast(
    model: Checkpoint | str | Path, calibration: Path, options: AllocationOptions, workers: int = 1
) -> Forecast:
    """What `thresholds` would take with so many workers like this process; nothing is written.

    Raises as `make_thresholds` does, also where a worker would have nothing to do, and `ThresholdsError` where not each
    block is run by itself: an allocation that trains, thresholds from a calibration's counts, a sparsity of 0.
    """
    options = _settled(options)
    if ALLOCATIONS[options.allocation].trains:
        raise ThresholdsError(
            f"--dry-run: allocation {options.allocation} trains the whole model, whose blocks cannot be measured one "
            "by one; start it: it says what is left after its first steps"
        )
    if options.block:
        raise ThresholdsError(
            "--dry-run: levels of planes take one pass forward and one back over a few thousand tokens, whose blocks "
            "cannot be measured one by one; start it: it says what is left after its first blocks"
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
    weights = weights_of(checkpoint, chosen_sites(checkpoint.sites, options.include, options.ignore))
    shard = Shard(world_size=workers).split(len(windows), BATCH)
    shard.check("--windows")
    choose = _chooser(checkpoint, read, options, weights, {}, ALONE.resume(""))
    stream = block_stream(checkpoint, options)

    def run_block(hidden: Tensor) -> None:
        _run_block(stream, 0, hidden, choose, ALONE.split(len(hidden), min(BATCH, len(windows))), lambda steps=1: None)

    return forecast_blocks(checkpoint, stream, windows, shard, run_block)

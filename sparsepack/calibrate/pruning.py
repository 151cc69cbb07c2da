"""The pass of `prune` over a model: one block at a time, each on what the pruned ones before it give. A block's inputs
are put into a better order where that is asked for, then each matrix is pruned.

Now and then the new tensors of the blocks that are done and the hidden states that enter the next one are saved beside
the output, in `.NAME.unfinished`, from which a run that was killed goes on.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.permute import better_order, of_query_heads, permuted_block
from sparsepack.calibrate.provenance import processor
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.sparsegpt import METHODS, Method
from sparsepack.errors import PruningError, SingularError, WorkersError
from sparsepack.files.atomic import check_inputs, check_output
from sparsepack.files.hashing import fingerprint
from sparsepack.files.tensors import all_finite, arithmetic, brought
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.checkpoint.writer import made_of_blocks, texts_of, write_checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.family import MLP_MID
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import Forecast, bound_line, forecast_blocks
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.hooks import routing_hooks, site_hooks
from sparsepack.models.pattern import Pattern
from sparsepack.models.provenance import PRUNING_FILE, Pruned, PrunedMatrix, records_beside
from sparsepack.models.sites import SiteKey, chosen_sites, site_name
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.option import check_type
from sparsepack.progress import Advance, Shorter
from sparsepack.reconstruction import Inputs, Sums, empty_sums, entering, inputs_name, inputs_of, root_of_share
from sparsepack.version import __version__
from sparsepack.workers.shard import ALONE, Shard


def prune(
    model: Checkpoint | str | Path,
    output: Path,
    options: PruneOptions,
    calibration: Path | None = None,
    overwrite: bool = False,
    shard: Shard = ALONE,
) -> Pruned:
    """Prune a model's matrices and write it as an ordinary checkpoint, a Hugging Face folder.

    calibration -- a folder made by `calibrate`, whose windows are run; magnitude takes none
    shard       -- this worker's of several, who run them together with the same bytes as one alone. The first one
                   writes the checkpoint and returns what was done, the others without matrices

    Embedding, output matrix, norms and biases stay as they are. Raises `PruningError` for options that make no sense,
    `CalibrationError` for a calibration of another model, `CheckpointError`, `SiteError`, `OutputError`, `WorkersError`
    and `WorkerLost`.
    """
    check_type("model", model, Checkpoint | Path, PruningError)
    check_type("output", output, Path, PruningError)
    check_type("options", options, PruneOptions, PruningError)
    check_type("calibration", calibration, Path | None, PruningError)
    options.check()
    options.check_calibration(calibration)
    output = Path(output)
    if shard.world_size > 1 and calibration is None:
        raise WorkersError(f"method {options.method} runs no text that workers could share; leave --devices out")
    if shard.first:
        check_output(output, overwrite, folder=True, marker=PRUNING_FILE)
    checkpoint = checkpoint_of(model)
    check_inputs(output, [checkpoint.path, *(() if calibration is None else (Path(calibration),))])
    if options.permute and not checkpoint.family.has_row:
        check_taken("permute", checkpoint.family, checkpoint.name)
    if options.permute and checkpoint.family.experts is not None:
        raise PruningError(
            f"permute: {checkpoint.name} has experts, whose neurons are not put into another order; leave it out"
        )
    if options.permute and checkpoint.family.k_eq_v:
        raise PruningError(
            f"permute: {checkpoint.name} has values that are keys, too, whose channels are not put into another order; "
            "leave it out"
        )
    if options.permute and checkpoint.family.state is not None:
        raise PruningError(
            f"permute: {checkpoint.name} has gates or convolutions at the channels of its heads, which are not put "
            "into another order; leave it out"
        )
    patterns = site_patterns(checkpoint, options)
    windows, digest = None, None
    read = checkpoint.source.hash.share_beside(
        shard.all_gather, lambda: None if calibration is None else load_calibration(calibration)
    )
    if read is not None:
        read.check_model(checkpoint)
        windows, digest = spread_windows(read.windows, options.windows), read.sha256
    # On which card of several it runs does not matter.
    stored = asdict(options) | {"device": torch.device(options.device).type}
    asked = {"model": checkpoint.sha256, "calibration": digest, "options": stored}
    shard = shard.split_for_sums(0 if windows is None else len(windows), options.batch)
    if windows is not None:
        shard.check("--windows")
    command = fingerprint({"sparsepack": __version__, **asked})
    hashes = {"model": checkpoint.sha256, "calibration": digest}
    shard.agree({**hashes, "processor": processor(options.device), "command": command})
    with shard.saved_beside(output) as shard:
        shard = shard.resume(command, checkpoint.layers)
        with torch.inference_mode():
            matrices = _run(checkpoint, windows, patterns, options, shard)
        made = Pruned(checkpoint.name, checkpoint.sha256, digest, stored, tuple(matrices))
        if not shard.first:
            return made
        records = {**records_beside(checkpoint.path), PRUNING_FILE: made.to_json()}
        pruned = made_of_blocks(checkpoint, shard.block)
        write_checkpoint(pruned, texts_of(checkpoint), records, output, overwrite)
    return made


def site_patterns(checkpoint: Checkpoint, options: PruneOptions) -> dict[SiteKey, Pattern]:
    """The pattern of every site that is pruned, in order of execution. Raises `SiteError` where nothing matches."""
    chosen = chosen_sites(checkpoint.sites, options.include, options.ignore)
    numbers = dict.fromkeys(chosen, (options.keep, options.of))
    for other in options.sites:
        numbers |= {
            key: (other.keep, other.of)
            for key in chosen_sites(checkpoint.sites, (other.site,), (), called="site")
            if key in numbers
        }
    return {key: Pattern(keep, of) for key, (keep, of) in numbers.items() if keep < of}


def _run(
    checkpoint: Checkpoint,
    windows: Tensor | None,
    patterns: Mapping[SiteKey, Pattern],
    options: PruneOptions,
    shard: Shard,
) -> list[PrunedMatrix]:
    """Prune the blocks that are not finished; the matrices of all at the first worker, elsewhere of some.

    windows -- int64 [N, S], or None where no input matters
    """
    stream = block_stream(checkpoint, options)
    matrices = [TypeAdapter(PrunedMatrix).validate_json(json.dumps(row)) for row in shard.value("matrices", [])]
    hidden = None if windows is None else stream.states(shard.own(windows), shard.hidden())
    steps = 1 + 2 * shard.runs
    shorter = None if windows is None else Shorter("--windows", len(windows))
    with shard.blocks("pruning", steps, steps, shorter, partial(bound_line, stream)) as (unfinished, advance):
        for layer in unfinished:
            sites = checkpoint.family.projections_of(layer)
            here = {site: patterns[layer, site] for site in sites if (layer, site) in patterns}
            stream.load(layer)
            found, rows = prune_loaded(checkpoint, stream, layer, here, hidden, options, shard, advance)
            matrices += rows
            advance()
            if hidden is not None:
                stream.replace(found)
                stream.pass_on(hidden, options.batch, shard.after_each(advance))
            shard.save_block(layer, found, hidden, matrices=[asdict(row) for row in matrices])
    return matrices


def block_stream(checkpoint: Checkpoint, options: PruneOptions) -> BlockStream:
    """The blocks of a model where and as they are run."""
    return open_blocks(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))


def prune_loaded(
    checkpoint: Checkpoint,
    stream: BlockStream,
    layer: int,
    patterns: Mapping[str, Pattern],
    hidden: Tensor | None,
    options: PruneOptions,
    shard: Shard,
    advance: Advance,
) -> tuple[dict[str, Tensor], list[PrunedMatrix]]:
    """The new tensors of the loaded block, by their names within it, and what was done to each, in their order.

    patterns -- of its sites; hidden -- what enters the block, this worker's windows; None where no input matters

    Each site is pruned by one of the workers.
    """
    products = METHODS[options.method].needs == "products"
    pruners = _pruners(checkpoint, layer, patterns, 1 if options.permute else shard.world_size)
    sums: list[dict[str, Sums]] = [{} for _ in range(shard.world_size)]
    for site in patterns if hidden is not None else ():
        sums[pruners[site]] |= empty_sums(checkpoint, site, layer, products, stream.device)
    if hidden is not None and patterns:
        _count(stream, layer, hidden, sums, shard, advance)
    else:
        advance(shard.runs)
    own = {site: pattern for site, pattern in patterns.items() if pruners[site] == shard.rank}
    inputs = inputs_of(sums[shard.rank], options.damping, layer)
    found, rows = (
        prune_block(checkpoint, layer, own, inputs, options, stream.device) if own or shard.first else ({}, [])
    )
    all_rows = [row for theirs in shard.all_gather([asdict(row) for row in rows]) for row in theirs]
    sites = [site_name(layer, site) for site in patterns]
    rows = [TypeAdapter(PrunedMatrix).validate_json(json.dumps(row)) for row in all_rows]
    changed = {name: tensor for each in shard.all_gather_tensors(found, to_gpu=True) for name, tensor in each.items()}
    return changed, sorted(rows, key=lambda row: sites.index(row.site))


def _pruners(checkpoint: Checkpoint, layer: int, sites: Iterable[str], workers: int) -> dict[str, int]:
    """The worker that prunes each site: the one that has the fewest columns so far, since what takes the time is to go
    through the columns of a matrix, one after the other. The down matrices are the first worker's, which tells of
    experts that no token reached; the others follow from the most columns on."""
    columns = {
        site: checkpoint.stacked_shape(site, layer)[1] * len(checkpoint.family_at(layer).projections_of(layer)[site])
        for site in sites
    }
    taken = [0] * workers
    pruners = {}
    for site in sorted(columns, key=lambda site: (site != MLP_MID, -columns[site])):
        pruners[site] = taken.index(min(taken))
        taken[pruners[site]] += columns[site]
    return pruners


def _count(
    stream: BlockStream,
    layer: int,
    hidden: Tensor,
    sums: Sequence[Mapping[str, Sums]],
    shard: Shard,
    advance: Advance,
) -> None:
    """Add what enters the matrices of the loaded block to the `sums` of each worker, at that worker: part by part, in
    their order, whichever worker has run each. hidden: what enters the block, this worker's windows"""
    family = stream.source.family
    of_part = {name: each.empty_like() for of_worker in sums for name, each in of_worker.items()}
    routed: list[Tensor] = []  # in this pass, before what enters the down matrices of experts is there

    def count(_: int, site: str, x: Tensor) -> None:
        for name, inputs in entering(family, site, x, routed[-1] if routed else None):
            if name in of_part:
                of_part[name].add(inputs)

    def route(chosen: Tensor) -> None:
        routed[:] = [chosen]

    def part_done(having: int) -> None:
        for worker, of_worker in enumerate(sums):
            counted = {f"{of}/{name}": value for of in of_worker for name, value in of_part[of].counted.items()}
            for found in shard.gather_in_order(counted, having, to=worker):
                for of, total in of_worker.items():
                    total.take({name: found[f"{of}/{name}"] for name in of_part[of].counted})
        for each in of_part.values():
            each.clear()

    done = shard.after_each(advance, part_done)
    with site_hooks([(layer, stream.block)], family, count), routing_hooks(stream.block, family, route, layer):
        for part in torch.split(hidden, shard.batch):
            stream(part)
            done()


def prune_block(
    checkpoint: Checkpoint,
    layer: int,
    patterns: Mapping[str, Pattern],
    inputs: Mapping[str, Inputs],
    options: PruneOptions,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[PrunedMatrix]]:
    """The tensors of a block that change, by their names within it, in their stored type on the CPU; and what was done.

    patterns -- of the sites that are pruned
    inputs   -- of these sites' matrices, by the names that `inputs_name` gives; none where the method needs none
    """
    family, method = checkpoint.family_at(layer), METHODS[options.method]
    prefix = f"{family.block(layer)}."
    inputs = dict(inputs)

    def tensor(name: str) -> Tensor:
        return checkpoint.tensor(prefix + name)

    def known(name: str, columns: int = 0) -> Inputs:
        columns = columns or checkpoint.stacked_shape(name, layer)[1]
        return inputs.get(name) or Inputs(torch.ones(columns, device=device))

    changed: dict[str, Tensor] = {}
    orders: dict[str, Tensor] = {}
    if options.permute:
        orders = _orders(checkpoint, layer, patterns, known, options, device)
        names = [name.removeprefix(prefix) for name in checkpoint.source.shapes if name.startswith(prefix)]
        block = {name: tensor(name) for name in names}
        neurons, channels = orders.get("mlp_mid"), orders.get("attn_out")
        moved = permuted_block(block, family, neurons, channels, checkpoint.config.num_attention_heads)
        changed = {name: value.contiguous() for name, value in moved.items() if value is not block[name]}
        if neurons is not None:
            inputs["mlp_mid"] = known("mlp_mid").permuted(neurons.to(device))
        if channels is not None:
            order = of_query_heads(channels, checkpoint.config.num_attention_heads)
            inputs["attn_out"] = known("attn_out").permuted(order.to(device))
    rows = []
    for site, pattern in patterns.items():
        for projection in family.projections_of(layer)[site]:
            name = family.weight(projection)
            stored = changed.get(name, tensor(name))
            of_each = [
                known(inputs_name(family, site, projection, n, layer), stored.shape[-1])
                for n in range(_matrices(stored))
            ]
            try:
                pruned, stay, error = _pruned(stored, of_each, method, pattern, device)
            except SingularError as found:
                raise PruningError(
                    f"{prefix}{projection}: {found}; give a larger --damping or more --windows"
                ) from found
            if stay is None:
                raise PruningError(f"{prefix}{projection}: weights that are not finite; they cannot be pruned")
            rows.append(
                PrunedMatrix(
                    matrix=f"{prefix}{projection}",
                    site=site_name(layer, site),
                    keep=pattern.keep,
                    of=pattern.of,
                    tail=pattern.tail(stored.shape[-1]),
                    density=stay / pruned.numel(),
                    error=error,
                    permuted=site in orders,
                )
            )
            changed[name] = pruned
    return changed, rows


def _matrices(stored: Tensor) -> int:
    """How many matrices a projection is: one, or one of each expert."""
    return len(stored) if stored.dim() == 3 else 1


def _pruned(
    stored: Tensor, inputs: Sequence[Inputs], method: Method, pattern: Pattern, device: torch.device
) -> tuple[Tensor, int | None, float]:
    """A matrix or those of all experts, pruned, in their stored type; how many of their weights are not zero, None
    where some are not finite; and their relative error.

    inputs -- what enters the matrix, or each of them
    """
    pruned, stay, finite = torch.empty(stored.shape, dtype=stored.dtype), 0, True
    size = difference = 0.0
    each = (len(inputs), -1, stored.shape[-1])
    for matrix, known, into in zip(stored.reshape(each), inputs, pruned.view(each), strict=True):
        weight = brought(matrix, device, torch.float32)
        made = method.prune(weight, known, pattern).to(stored.dtype)
        into.copy_(made)
        stay, finite = stay + int(made.count_nonzero()), finite and all_finite(made)
        size += known.output_squares(weight)
        difference += known.output_squares(weight - made.float())
    return pruned, stay if finite else None, root_of_share(difference, size)


def _orders(
    checkpoint: Checkpoint,
    layer: int,
    patterns: Mapping[str, Pattern],
    known: Callable[[str], Inputs],
    options: PruneOptions,
    device: torch.device,
) -> dict[str, Tensor]:
    """Better orders, on the CPU: of the neurons by "mlp_mid", of the channels of each value head by "attn_out". Sites
    where none was found are left out."""
    orders = {}
    values_of = METHODS[options.method].values
    for site, pattern in patterns.items():
        if site not in ("mlp_mid", "attn_out"):
            continue
        (weight,) = checkpoint.projections(layer, site)
        values = values_of(brought(weight, device, torch.float32), known(site))
        if site == "mlp_mid":
            if (order := better_order(values, pattern)) is not None:
                orders[site] = order.cpu()
            continue
        config = checkpoint.config
        heads, kv_heads = config.num_attention_heads, checkpoint.family.setting(config, "num_key_value_heads")
        width = values.shape[1] // heads
        if width % pattern.of:
            continue  # groups would lie across heads, each of which has an order of its own
        # A channel of a value head is a column for each query head that shares it.
        of_head = values.view(-1, kv_heads, heads // kv_heads, width).permute(1, 0, 2, 3).flatten(1, 2)
        found = [better_order(rows, pattern) for rows in of_head]
        if any(order is not None for order in found):
            same = torch.arange(width, device=device)
            orders[site] = torch.stack([same if order is None else order for order in found]).cpu()
    return orders


@torch.inference_mode()
def forecast(
    model: Checkpoint | str | Path, options: PruneOptions, calibration: Path | None, workers: int = 1
) -> Forecast:
    """What `prune` would take with so many workers like this process; nothing is written.

    Raises as `prune` does, also where a worker would have nothing to do, and `PruningError` of a method that runs no
    text or a choice of sites that leaves the first block as it is.
    """
    options.check()
    options.check_calibration(calibration)
    if calibration is None:
        raise PruningError(f"--dry-run: method {options.method} runs no text, and takes as long as reading does")
    checkpoint = checkpoint_of(model, hashed=False)
    read = load_calibration(calibration)
    read.check_model(checkpoint)
    windows = spread_windows(read.windows, options.windows)
    shard = Shard(world_size=workers).split_for_sums(len(windows), options.batch)
    shard.check("--windows")
    patterns = {site: pattern for (layer, site), pattern in site_patterns(checkpoint, options).items() if layer == 0}
    if not patterns:
        raise PruningError("--dry-run: the first block, which is measured, is not pruned; expected it among the sites")
    stream = block_stream(checkpoint, options)

    def run_block(hidden: Tensor) -> None:
        alone = ALONE.split(len(hidden), min(options.batch, len(windows)))
        found, _ = prune_loaded(checkpoint, stream, 0, patterns, hidden, options, alone, lambda steps=1: None)
        stream.replace(found)
        stream.pass_on(hidden, alone.batch, lambda: None)

    return forecast_blocks(checkpoint, stream, windows, shard, run_block)

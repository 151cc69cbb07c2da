"""The streaming pass of `calibrate` over text, block by block, that collects every statistic any packer needs.

Now and then the statistics of the blocks that are done and the hidden states that enter the next one are saved beside
the output, in `.NAME.unfinished`. A run that was killed goes on from there with the hidden states it really had.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibrate import collectors, folder
from sparsepack.calibrate.collect import FEW_AT_ONCE, FEWEST_SAMPLES, MOST_SAMPLES, TOKENS_AT_ONCE, CalibrateOptions
from sparsepack.calibrate.collector import SiteInput, column_norms, parts_on, recorder_on
from sparsepack.calibrate.collectors import Statistics, ends_run
from sparsepack.calibrate.folder import Calibration, heads_of, residual_of, sites_of
from sparsepack.calibrate.provenance import facts, made_from
from sparsepack.calibrate.statistics import told_of_starved
from sparsepack.errors import CalibrationError
from sparsepack.files.hashing import fingerprint
from sparsepack.files.tensors import arithmetic
from sparsepack.files.text import Text, read_text
from sparsepack.files.transfer import on_host
from sparsepack.formats.table import holders
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.family import ATTN_OUT, MLP_MID
from sparsepack.models.hf_config import attention_layers, expert_numbers, head_dim
from sparsepack.models.hf_model.blocks import BlockStream, Record
from sparsepack.models.hf_model.forecast import Forecast, bound_line, forecast_blocks
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.hooks import check_finite, routing_hooks, site_hooks, stream_hooks
from sparsepack.models.tokenizer.windows import HELD_OUT_SHARE, check_vocabulary, drawn_windows, window_length
from sparsepack.option import check_type
from sparsepack.progress import Advance, Shorter, say
from sparsepack.version import __version__
from sparsepack.workers import PARTS
from sparsepack.workers.shard import ALONE, Shard


def calibrate(
    model: Checkpoint | str | Path,
    text: Text | str | Sequence[str],
    output: Path,
    options: CalibrateOptions | None = None,
    overwrite: bool = False,
    shard: Shard = ALONE,
) -> Calibration:
    """Collect the statistics of a model over text into the folder `output` (section "Calibration folder").

    model -- opened, or what `open_checkpoint` opens; text -- read, or what `read_text` reads
    shard -- this worker's of several, who do it together with the same bytes as one alone. The first one writes it and
             returns it whole, the others without statistics

    Before anything is run a note says which formats can hold the model. Raises `CheckpointError`, `CalibrationError`,
    `TextError` (too short, or tokens beyond the model), `OutputError`, `WorkersError` and `WorkerLost`.
    """
    check_type("model", model, Checkpoint | Path, CalibrationError)
    check_type("text", text, Text | str | tuple[str, ...], CalibrationError)
    check_type("output", output, Path, CalibrationError)
    check_type("options", options, CalibrateOptions | None, CalibrationError)
    checkpoint = checkpoint_of(model)
    text = text if isinstance(text, Text) else read_text(text)
    output = Path(output)
    options = options or CalibrateOptions()
    options = settled(checkpoint, options)
    if shard.first:
        folder.check_output(output, overwrite)

    def drawn() -> list[torch.Tensor]:
        chosen = [part.tolist() for part in chosen_windows(checkpoint, text, options)] if shard.first else None
        return [torch.tensor(part, dtype=torch.long) for part in shard.broadcast(chosen)]

    # Nobody asks for the model's hash before something is kept: it is taken while blocks run.
    with checkpoint.source.hash.meanwhile(shard.all_gather) as model_sha256:
        windows, held_out = drawn()
        batch = at_once(options.batch, len(windows), windows.shape[1], options.device)
        shard = shard.split_for_sums(len(windows), batch)
        shard.check("--samples")

        def manifest(sha256: str | None = None) -> dict[str, Any]:
            return _manifest(checkpoint, text, windows, len(held_out), options, batch, sha256)

        shapes = fingerprint({name: list(shape) for name, shape in checkpoint.source.shapes.items()})
        shard.agree(facts(manifest(shapes), options.device))
        say(f"note: {holders(checkpoint)}")
        if options.held_out and not len(held_out):
            say(
                f"note: {text.name}: no window of {len(windows)} is held out, so pack will not score what is lost; "
                f"give a text of {HELD_OUT_SHARE} windows or more, or a smaller --context"
            )

        @cache
        def same_model() -> None:
            shard.agree({"model": model_sha256()})

        with shard.saved_beside(output) as shard:
            shard = shard.resume(lambda: fingerprint(manifest()), checkpoint.layers, same_model)
            with torch.inference_mode():
                layers = _run(checkpoint, windows, options, shard)
            same_model()
            made = Calibration(manifest(), tuple(layers), windows, held_out)
            if shard.first and (starved := told_of_starved(made)) is not None:
                say(f"note: {starved}")
            return folder.save(made, output, overwrite) if shard.first else made


def settled(checkpoint: Checkpoint, options: CalibrateOptions) -> CalibrateOptions:
    """The options with the number of windows and of their tokens that a model gets, checked."""
    context = window_length(options.context, checkpoint.config.max_position_embeddings)
    samples = samples_of(checkpoint, options.samples, context, options.device)
    options = replace(options, context=context, samples=samples)
    options.check()
    return options


def chosen_windows(checkpoint: Checkpoint, text: Text, options: CalibrateOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows of a text that are run, int64 [N, S], and the tokens of those held out, int64 [M, context].
    Raises `CalibrationError` and `TextError`."""
    limit = checkpoint.config.max_position_embeddings
    context = window_length(options.context, limit)
    if context > limit:
        raise CalibrationError(f"context {context}: {checkpoint.name} was made for at most {limit}")
    windows, held_out = drawn_windows(
        checkpoint.tokenizer, text, context, options.samples or 0, options.seed, options.held_out
    )
    if windows.shape[1] <= options.sinks:
        raise CalibrationError(
            f"context {context}, sinks {options.sinks}: without a BOS token a window has "
            f"{windows.shape[1]} positions, none is left to count; give a larger context"
        )
    for tokens in (windows, held_out):
        check_vocabulary(checkpoint.tokenizer, tokens, checkpoint.config.vocab_size, text)
    return windows, held_out


def _manifest(
    checkpoint: Checkpoint,
    text: Text,
    windows: torch.Tensor,
    held_out: int,
    options: CalibrateOptions,
    batch: int,
    sha256: str | None,
) -> dict[str, Any]:
    count, context = windows.shape
    return {
        "schema": folder.SCHEMA,
        "kind": "calibration",
        "sparsepack": __version__,
        **made_from(checkpoint, text, options.device, computed_in(checkpoint, options), batch, sha256),
        "attention": heads_of(checkpoint),
        **({} if checkpoint.family.uniform else {"sites": sites_of(checkpoint)}),
        "residual": residual_of(checkpoint),
        "tokens": {
            "windows": count,
            "context": options.context,
            "run": count * context,
            "counted": count * (context - options.sinks),
            "sinks": options.sinks,
            "sinks_left_out": count * options.sinks,
            "padding_left_out": 0,  # windows are always full
            "samples_asked": options.samples,
            "held_out": held_out,
            "seed": options.seed,
        },
    }


def computed_in(checkpoint: Checkpoint, options: CalibrateOptions) -> torch.dtype:
    """The type that blocks are computed in."""
    return arithmetic(options.dtype, checkpoint.dtype, options.device)


def _run(checkpoint: Checkpoint, windows: torch.Tensor, options: CalibrateOptions, shard: Shard) -> list[Statistics]:
    """The statistics of all blocks at the first worker; elsewhere none. windows: int64 [N, S]"""
    stream = open_blocks(checkpoint, options.device, computed_in(checkpoint, options))
    sites = [None] * checkpoint.layers if checkpoint.family.uniform else sites_of(checkpoint)
    attend = attention_layers(checkpoint.config)
    layers = [
        collectors.of_block(layer, shard.block(layer), layer in attend, sites[layer]) if shard.first else {}
        for layer in range(shard.done)
    ]
    if shard.done == checkpoint.layers:  # what leaves the last block is not kept: nobody reads it
        return layers
    hidden = stream.states(shard.own(windows), shard.hidden())
    runs = (residual_of(checkpoint) or {"runs": 0})["runs"]
    of_run: Statistics = shard.kept_after(_RUN)
    shorter, record = Shorter("--samples", len(windows)), recorder_on(stream)
    bound = partial(bound_line, stream)
    with shard.blocks("calibrating", shard.runs, shorter=shorter, bound=bound) as (unfinished, advance):
        for layer in unfinished:
            stream.load(layer)
            statistics = count_block(checkpoint, stream, layer, hidden, options, shard, of_run, advance, record)
            if ends_run(layer, checkpoint.layers, runs):
                statistics |= of_run
                of_run = {}
            shard.keep_after(_RUN, of_run)
            layers.append(statistics)
            last = layer + 1 == checkpoint.layers
            if not last or shard.stale:
                gpu = stream.device.type == "cuda"
                ready = torch.cuda.current_stream(stream.device).record_event() if gpu else None
                brought = partial(_brought, layers, layer, ready)
                shard.save_block(layer, brought, None if last else hidden)
            else:  # all of it is written soon
                shard.wait()
                _brought(layers, layer)
    return layers


def _brought(layers: list[Statistics], layer: int, ready: torch.cuda.Event | None = None) -> dict[str, torch.Tensor]:
    """Bring the statistics of a block to the host; returns them as they are named in a file. ready -- as `on_host`'s"""
    layers[layer] = {name: on_host(value, ready) for name, value in layers[layer].items()}
    for name, value in layers[layer].items():
        check_finite(value, f"block {layer}, {name}")
    return collectors.named(layer, layers[layer])


_RUN = "run"
"""Under this name is kept what was counted of a run of blocks that is not over."""


def count_block(
    checkpoint: Checkpoint,
    stream: BlockStream,
    layer: int,
    hidden: torch.Tensor,
    options: CalibrateOptions,
    shard: Shard,
    of_run: Statistics,
    advance: Advance,
    record: Record | None,
) -> Statistics:
    """The statistics of the loaded block, on its device, at the first worker; what belongs to a run of blocks is added
    to `of_run` there.

    hidden -- what enters the block, this worker's windows, in whose place comes what leaves it
    record -- see `recorder_on`

    What is counted in one part of the windows is added when the part is done, in the order of the parts, whichever
    worker has run them: sums then have the same bits for every number of workers.
    """
    family, config = checkpoint.family, checkpoint.config
    epsilon = float(getattr(config, "rms_norm_eps", None) or 0)
    norms = {site: column_norms(stream.block, family, site, layer) for site in family.projections_of(layer)}
    if stream.device.type == "cpu":  # a GPU is not waited for: what was counted there is looked at later
        for site, of_site in norms.items():
            check_finite(of_site, f"block {layer}, norms of the columns at {site}")
    experts = expert_numbers(config, layer)
    statistics: Statistics = {}
    of_part: Statistics = {}
    run_of_part: Statistics = {}

    def collect(_: int, site: str, x: torch.Tensor) -> None:
        x = x[:, options.sinks :]
        seen = SiteInput(x, norms[site], neurons=site == MLP_MID and experts is None)
        collectors.count(of_part, "site", site, seen)
        if site == ATTN_OUT and family.residual is not None:
            kv_heads, channels = family.setting(config, "num_key_value_heads"), head_dim(config)
            collectors.count(of_part, "outputs", "attention", x, kv_heads, channels)
        if seen.neurons:
            collectors.count(of_part, "neurons", "neurons", seen)

    attends = layer in attention_layers(config)

    def watch(query: torch.Tensor, key: torch.Tensor, window: int) -> None:
        if not attends:
            return
        without = query[:, :, options.sinks :], key[:, :, options.sinks :]
        collectors.count(of_part, "attention", "attention", *without, window)
        collectors.count(of_part, "window", "attention", query, key, window)

    def read(states: torch.Tensor) -> None:
        collectors.count(run_of_part, "residual", "residual", states[:, options.sinks :], epsilon)

    def route(chosen: torch.Tensor) -> None:
        assert experts is not None
        collectors.count(of_part, "experts", "experts", chosen[:, options.sinks :], experts.count)

    def part_done(having: int) -> None:
        for found in shard.gather_in_order({**of_part, **run_of_part}, having):
            collectors.add_to(statistics, {name: found[name] for name in of_part})
            collectors.add_to(of_run, {name: found[name] for name in run_of_part})
        for counted in (*of_part.values(), *run_of_part.values()):
            counted.zero_()  # in its place: a recorded run adds to these tensors

    with (
        site_hooks([(layer, stream.block)], family, collect),
        stream_hooks(stream.block, family, read),
        routing_hooks(stream.block, family, route, layer),
        stream.watched(watch),
        stream.with_parts(parts_on(stream.device)),
    ):
        stream.pass_on(hidden, shard.batch, shard.after_each(advance, part_done), record)
    return statistics


WORK = 1.5e13
"""Weights times tokens: two cores take about six minutes for so much. A model with 900 million weights in its blocks
gets `FEWEST_SAMPLES` windows of 2048 tokens by this, one with 57 million gets `MOST_SAMPLES`."""


def samples_of(checkpoint: Checkpoint, asked: int | None, context: int, device: str) -> int:
    """The number of windows to draw, 0 for all: what is asked for; else `MOST_SAMPLES`, or on a CPU as many as `WORK`
    has room for, `FEWEST_SAMPLES` at least."""
    if asked is not None:
        return asked
    if device != "cpu":
        return MOST_SAMPLES
    weights = sum(math.prod(checkpoint.stacked_shape(site, layer)) for layer, site in checkpoint.sites)
    return max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(WORK / (weights * context))))


def at_once(asked: int | None, windows: int, context: int, device: str) -> int:
    """How many of so many windows run at a time: what is asked for, or what suits a device; see `CalibrateOptions`."""
    if asked is not None:
        return asked
    if torch.device(device).type != "cuda":
        return FEW_AT_ONCE
    return max(FEW_AT_ONCE, min(TOKENS_AT_ONCE // context, windows // PARTS))


@torch.inference_mode()
def forecast(
    model: Checkpoint | str | Path, text: Text | str | Sequence[str], options: CalibrateOptions, workers: int = 1
) -> Forecast:
    """What `calibrate` would take with so many workers like this process; nothing is written.

    Raises as `calibrate` does, also where a worker would have nothing to do.
    """
    checkpoint = checkpoint_of(model, hashed=False)
    options = settled(checkpoint, options)
    windows, _ = chosen_windows(checkpoint, text if isinstance(text, Text) else read_text(text), options)
    batch = at_once(options.batch, len(windows), windows.shape[1], options.device)
    shard = Shard(world_size=workers).split_for_sums(len(windows), batch)
    shard.check("--samples")
    stream = open_blocks(checkpoint, options.device, computed_in(checkpoint, options))

    record = recorder_on(stream)

    def run_block(hidden: Tensor) -> None:
        alone = ALONE.split(len(hidden), min(batch, len(windows)))
        count_block(checkpoint, stream, 0, hidden, options, alone, {}, lambda steps=1: None, record)

    width, runs = int(checkpoint.config.hidden_size), (residual_of(checkpoint) or {"runs": 0})["runs"]
    sums = (runs + 1) * 8 * width**2 if runs else 0
    return forecast_blocks(checkpoint, stream, windows, shard, run_block, sums)

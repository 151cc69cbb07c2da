"""The pass of `rotate` over a model: each block made in the new basis and run beside the block that it was; and whether
the rotated model is the model: both are run over some tokens, and their logits compared.

The bases, each new block and the hidden states of both models are kept beside the output, in `.NAME.unfinished`, from
which a run that was killed goes on.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibrate.bases import ROTATIONS, check_count
from sparsepack.calibrate.folder import Calibration, residual_of
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.provenance import processor
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.statistics import output_moments, second_moments
from sparsepack.calibrate.training import check_share, trainer
from sparsepack.errors import RotationError, WorkersError
from sparsepack.files.atomic import check_inputs, check_output
from sparsepack.files.hashing import fingerprint
from sparsepack.files.tensors import brought, type_name
from sparsepack.formats.blocks.table import stored_bytes, type_that_fits
from sparsepack.formats.zigzag.plan import BASIS_TYPE
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.checkpoint.rotated import bases_of, check_one_basis, rotated, rotated_config
from sparsepack.models.checkpoint.writer import CONFIG, made_of_blocks, texts_of, write_checkpoint
from sparsepack.models.families import stream_of
from sparsepack.models.family import HEAD, SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import memory_so_far
from sparsepack.models.provenance import ROTATION_FILE, Rotated, distillation_record, pruning_record, rotation_record
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.option import check_type
from sparsepack.version import __version__
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.shard import ALONE, Shard

_BASES, _TURNED = "bases", "turned"
"""Under these names are kept the bases, and the rotated model's hidden states."""


def rotate(
    model: Checkpoint | str | Path,
    calibration: Path,
    output: Path,
    options: RotateOptions | None = None,
    overwrite: bool = False,
    shard: Shard = ALONE,
) -> Rotated:
    """Write a model with its residual stream in another basis: the same function as an ordinary checkpoint, a Hugging
    Face folder; with several segments a folder that sparsepack alone opens. Some of the calibration's text is run by
    both, and nothing is written where their logits differ.

    calibration -- a folder made by `calibrate`
    shard       -- this worker's of several, who make the blocks together, and learn a basis, with the same bytes as one
                   alone. The first one writes them; all return the record

    Raises `RotationError` for options that make no sense, a model that was rotated or pruned before, more segments than
    it can have, and a calibration that lacks what the basis needs; `CalibrationError` for one of another model;
    `CheckpointError` also for a model of a family that cannot be rotated; `OutputError`; `WorkersError` and
    `WorkerLost`.
    """
    options = options or RotateOptions()
    check_type("model", model, Checkpoint | Path, RotationError)
    check_type("calibration", calibration, Path, RotationError)
    check_type("output", output, Path, RotationError)
    check_type("options", options, RotateOptions, RotationError)
    options.check()
    output = Path(output)
    if shard.first:
        check_output(output, overwrite, folder=True, marker=ROTATION_FILE)
    checkpoint, read = opened(model, calibration, options, shard)
    check_inputs(output, [checkpoint.path, Path(calibration)])
    basis = ROTATIONS[options.basis]
    # On which card of several it runs does not matter.
    stored = asdict(options) | {"device": torch.device(options.device).type}
    hashes = {"model": checkpoint.sha256, "calibration": read.sha256}
    command = fingerprint({"sparsepack": __version__, **hashes, "options": stored})
    shard.agree({**hashes, "processor": processor(options.device), "command": command})
    tokens = checked_tokens(read.windows)
    with shard.saved_beside(output) as shard, torch.inference_mode():
        shard = shard.resume(command, checkpoint.layers)
        if kept := shard.broadcast_tensors(shard.state.kept(_BASES)):
            found = bases_of(kept)
        else:
            if basis.trains:
                check_share(shard.world_size, options.batch)
            # The first one's for all: eigenvectors may differ in their last bits from machine to machine.
            found = bases_of(shard.broadcast_tensors(basis.find(checkpoint, read, options).tensors()))
            if basis.trains:
                found = basis.learn(checkpoint, read, found, options, trainer(shard, options))
                found = bases_of(shard.broadcast_tensors(found.tensors()))
            shard.begin_blocks(_BASES, found.tensors())
        view = rotated(checkpoint, found, options.weights, options.device)
        made = made_of_blocks(view, shard.block)
        error = _run(checkpoint, view, made, tokens, shard, options.device)
        check_error(error, made.dtype, checkpoint.name)
        record = Rotated(
            model=checkpoint.name,
            model_sha256=checkpoint.sha256,
            calibration_sha256=read.sha256,
            options=stored,
            boundaries=found.boundaries,
            weights=type_name(made.dtype),
            tokens=tokens.numel(),
            error=error,
            notes=tuple(notes_of(checkpoint, made, options.basis)),
        )
        if shard.first:
            texts = texts_of(checkpoint)
            texts[CONFIG] = rotated_config(texts[CONFIG], made)
            write_checkpoint(made, texts, {ROTATION_FILE: record.to_json()}, output, overwrite)
    return record


def opened(
    model: Checkpoint | str | Path, calibration: Path, options: RotateOptions, shard: Shard
) -> tuple[Checkpoint, Calibration]:
    """The model and its calibration, of which all is known that `rotate` asks of them. Raises as `rotate` does."""
    checkpoint = checkpoint_of(model)
    check_model(checkpoint, options)
    if shard.world_size > checkpoint.layers:
        raise WorkersError(
            f"{shard.world_size} workers for {checkpoint.layers} blocks: some would be idle; start fewer"
        )
    read = checkpoint.source.hash.share_beside(shard.all_gather, lambda: load_calibration(calibration))
    read.check_model(checkpoint)
    needs = ROTATIONS[options.basis].needs
    if needs == "moments" and (second_moments(read) is None or output_moments(read) is None):
        raise RotationError(
            f"{calibration}: a calibration without the second moments of the residual stream and of what heads give, "
            "from a sparsepack before they were counted; make it again: sparsepack calibrate "
            f"{checkpoint.name} --text TEXT -o FOLDER"
        )
    return checkpoint, read


def check_model(checkpoint: Checkpoint, options: RotateOptions) -> None:
    """Raise `CheckpointError` for a model of a family that cannot be rotated, and `RotationError` for one that has no
    such bases, or should not be rotated: it was before, or it was distilled or pruned."""
    stream_of(checkpoint.family, checkpoint.name)
    if (before := rotation_record(checkpoint.path)) is not None:
        raise RotationError(
            f"{checkpoint.name}: rotated already, into the basis {before.summary['basis']} of "
            f"{before.summary['model']}; rotate that model"
        )
    if (distilled := distillation_record(checkpoint.path)) is not None:
        raise RotationError(
            f"{checkpoint.name}: distilled from {distilled.summary['model']}, for skipping in the basis that it has: "
            "rotate that model, then distil it"
        )
    if (pruned := pruning_record(checkpoint.path)) is not None:
        raise RotationError(
            f"{checkpoint.name}: pruned from {pruned.summary['model']}; in another basis its zeros would be numbers: "
            "rotate that model, then prune it"
        )
    check_one_basis(checkpoint)
    residual = residual_of(checkpoint)
    check_count(checkpoint, options.segments, residual["runs"] if residual else 1)
    ROTATIONS[options.basis].check_model(checkpoint)


def _run(
    checkpoint: Checkpoint, view: Checkpoint, made: Checkpoint, tokens: Tensor, shard: Shard, device: str
) -> float:
    """Make the blocks that are not finished, each at one of the workers; the relative error of the logits.

    view, made -- the rotated model, its tensors made as they are read, and its blocks as they are kept

    The first worker takes the blocks of all, runs and keeps them. What they were is run by the second one, where there
    is one, at the same time.
    """
    model, other = (BlockStream(source, device) for source in (checkpoint, made))
    runs_model = min(1, shard.world_size - 1)
    hidden, turned = shard.hidden(), shard.broadcast_tensors(shard.kept_after(_TURNED)).get("hidden")
    if hidden is None or turned is None:
        hidden, turned = model.embed(tokens), other.embed(tokens)
    with shard.blocks("rotating") as (unfinished, advance):
        for start in range(0, len(unfinished), shard.world_size):
            layers = unfinished[start : start + shard.world_size]
            own = block_of(view, layers[shard.rank]) if shard.rank < len(layers) else {}
            blocks = deque(shard.gather_in_order(own, len(layers), alike=False))  # none but at the first worker
            for layer in layers:
                found = blocks.popleft() if blocks else {}
                if shard.rank == runs_model:
                    run_block(model, layer, hidden)
                if shard.first:
                    run_block(other, layer, turned, found)
                    shard.keep_after(_TURNED, {"hidden": turned})
                if shard.rank == runs_model != 0:
                    shard.send([hidden], 0)
                elif shard.first and runs_model != 0:
                    shard.receive([hidden], runs_model)
                shard.save_block(layer, found, hidden if shard.first else None)
                advance()
    error = 0.0
    if shard.first:
        for stream in (model, other):
            stream.load(checkpoint.layers - 1)
        error = relative_error(model, other, hidden, turned)
    return float(shard.broadcast(error))


def run_block(stream: BlockStream, layer: int, hidden: Tensor, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Take what enters a block through it: the stream's own, or one of such tensors, by their names within it."""
    stream.load(layer, tensors)
    stream.pass_on(hidden, 1, lambda: None)
    stream.unload()


def block_of(view: Checkpoint, layer: int) -> dict[str, Tensor]:
    """The tensors of a block of the rotated model, by their names within it."""
    prefix = f"{view.family.block(layer)}."
    names = [name for name in view.source.shapes if name.startswith(prefix)]
    return {name.removeprefix(prefix): view.tensor(name) for name in names}


def notes_of(checkpoint: Checkpoint, made: Checkpoint, basis: str) -> Iterator[str]:
    """What a rotated model, `made` of a checkpoint, costs, and which formats it suits."""
    if checkpoint.tied:
        yield (
            "the output matrix was the embedding itself (tied) and is a matrix of its own now: "
            f"{_bytes(made, [HEAD]):,} bytes more in {type_name(made.source.dtypes[HEAD])}"
        )
    if made.dtype != checkpoint.dtype:
        why = ", which would round the weights again" if made.dtype.itemsize > checkpoint.dtype.itemsize else ""
        yield (
            f"stored in {type_name(made.dtype)}, not in {type_name(checkpoint.dtype)}{why}: "
            f"{_bytes(made, made.source.shapes):,} bytes in place of {_bytes(checkpoint, checkpoint.source.shapes):,}"
        )
    if made.bases:
        yield _note_of_changes(made)
    row = ROTATIONS[basis]
    yield f"{basis} suits {', '.join(row.formats)}: {row.why}"


def _note_of_changes(made: Checkpoint) -> str:
    """What the matrices between segments cost in the checkpoint, and at each token in the packed model."""
    count, hidden = len(made.bases), int(made.config.hidden_size)
    names = [made.family.basis(layer) for layer in made.bases]
    matrices = sum(prod(made.stacked_shape(site, layer)) for layer in range(made.layers) for site in SITES)
    kind = type_that_fits(BASIS_TYPE, hidden)
    packed = stored_bytes(kind, count * hidden**2)
    share = packed / stored_bytes("Q4_K", matrices)
    stored = type_name(made.source.dtypes[names[0]])
    return (
        f"{count} change{'s' if count > 1 else ''} of basis between segments, {hidden:,} x {hidden:,} each: "
        f"{_bytes(made, names):,} bytes more in {stored}; packed {packed:,} in {kind}, all of which each token reads: "
        f"{100 * share:.1f} % of what the blocks' matrices are in Q4_K"
    )


def _bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    source = checkpoint.source
    return sum(prod(source.shapes[name]) * source.dtypes[name].itemsize for name in names)


WINDOWS, TOKENS = 4, 128
"""So many windows of the calibration are run, and so many tokens of each."""

BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
"""The largest relative error of the logits, by the type in which the rotated weights are stored: computing in float32
leaves about 1e-6, and rounding weights to 16 bits what it does to any model. A wrong rotation leaves more than 1."""

_WORDS = 8192
"""The logits of this many tokens of the vocabulary exist at one time."""


def checked_tokens(windows: Tensor) -> Tensor:
    """What is run, of a calibration's windows [N, S]: int64 [windows, tokens]."""
    return spread_windows(windows, WINDOWS)[:, :TOKENS]


def relative_error(model: BlockStream, rotated: BlockStream, hidden: Tensor, turned: Tensor) -> float:
    """The difference of two models' logits over those of the first, in the Frobenius norm.

    hidden, turned -- what leaves the last block of each, [N, S, H]; the streams have run that block
    """
    outputs = [stream.finish(states) for stream, states in ((model, hidden), (rotated, turned))]
    heads = [torch.split(stream.head(), _WORDS) for stream in (model, rotated)]
    difference = norm = 0.0
    for words in zip(*heads, strict=True):
        logits, others = (
            states @ brought(rows, states.device, states.dtype).t() for states, rows in zip(outputs, words, strict=True)
        )
        difference += float((logits - others).square().sum(dtype=torch.float64))
        norm += float(logits.square().sum(dtype=torch.float64))
    return math.sqrt(difference / norm) if norm else math.inf if difference else 0.0


def check_error(error: float, weights: torch.dtype, name: str) -> None:
    """Raise `RotationError` where logits differ by more than the type of the weights explains."""
    bound = BOUNDS[weights]
    if not error <= bound:
        raise RotationError(
            f"{name}: rotated, its logits differ by {error:.2g} of their size, {type_name(weights)} explains at most "
            f"{bound:g}; nothing was written: please report this model"
        )


@torch.inference_mode()
def forecast(
    model: Checkpoint | str | Path, calibration: Path, options: RotateOptions, workers: int = 1
) -> PartsForecast:
    """What `rotate` would take with so many workers like this process; nothing is written. The bases are found, and of
    the blocks one is made and run beside the one that it was.

    Raises as `rotate` does, also where a worker would have nothing to do, and `RotationError` for a basis that is
    learnt from the whole model.
    """
    options.check()
    basis = ROTATIONS[options.basis]
    if basis.trains:
        raise RotationError(
            f"--dry-run: basis {options.basis} trains the whole model, whose blocks cannot be measured one by one; "
            "start it: it says what is left after its first steps"
        )
    checkpoint, read = opened(model, calibration, options, Shard(world_size=workers))
    device = torch.device(options.device)
    began = time.perf_counter()
    found = basis.find(checkpoint, read, options)
    finding = time.perf_counter() - began
    view = rotated(checkpoint, found, options.weights, options.device)
    tokens = checked_tokens(read.windows)
    streams = BlockStream(checkpoint, options.device), BlockStream(view, options.device)
    states = [stream.embed(tokens) for stream in streams]
    times: list[float] = []
    for layer in range(min(2, checkpoint.layers)):  # the first one is for what only the first takes, such as libraries
        times = [time.perf_counter()]
        block = block_of(view, layer)
        times.append(time.perf_counter())
        for stream, hidden, tensors in zip(streams, states, (None, block), strict=True):
            run_block(stream, layer, hidden, tensors)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())
    making, before, new = (later - earlier for earlier, later in pairwise(times))
    by_first = before + new if workers == 1 else max(before, new)
    source, written = checkpoint.source, view.source
    return PartsForecast(
        measured=f"one block: made in {making:.2f} s and run in {new:.2f} s, the one that it was in {before:.2f} s; "
        f"the basis found in {finding:.1f} s",
        device=options.device,
        workers=workers,
        parts=f"{checkpoint.layers} blocks",
        dealt_seconds=checkpoint.layers * making,
        alone_seconds=finding + checkpoint.layers * by_first,
        bytes_read=sum(prod(shape) * source.dtypes[name].itemsize for name, shape in source.shapes.items()),
        bytes_written=sum(prod(shape) * written.dtypes[name].itemsize for name, shape in written.shapes.items()),
        memory_bytes=memory_so_far(device),
        uncounted="exchanging, saving and writing",
    )

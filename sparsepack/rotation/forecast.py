"""`rotate --dry-run`: what rotating a model by some workers would take."""

import time
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from sparsepack.errors import RotationError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import rotated
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.forecast import memory_so_far
from sparsepack.rotation.bases import ROTATIONS
from sparsepack.rotation.check import checked_tokens
from sparsepack.rotation.options import RotateOptions
from sparsepack.rotation.run import block_of, opened, run_block
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.resume import ResumeState
from sparsepack.workers.workers import Workers


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
    checkpoint, read = opened(model, calibration, options, Workers(0, workers))
    device = torch.device(options.device)
    began = time.perf_counter()
    found = basis.find(checkpoint, read, options, ResumeState(None, ""))
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

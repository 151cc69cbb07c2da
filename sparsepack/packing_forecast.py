"""`pack --dry-run`, what packing a model by some workers would take, and what it takes as reckoned for a recipe."""

import time
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparsepack.calibrate.refitting import AT_ONCE, fitting_windows
from sparsepack.errors import PackingError
from sparsepack.files.tensors import arithmetic
from sparsepack.formats.containers.write_tensors import FORKED_FROM, write_files
from sparsepack.formats.plan import Plan, PlannedGroup, TensorFile
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.forecast import LIVE, block_by_block_bytes, memory_so_far
from sparsepack.operation import Cost
from sparsepack.packing import PackRequest, find, plan_of
from sparsepack.packing_score import cost_of, scoring_of
from sparsepack.workers.forecast import PartsForecast


def cost(checkpoint: Checkpoint, request: PackRequest, windows: tuple[int, int], held_out: int) -> Cost:
    """What fitting weights takes, and scoring what was lost. Each block is run once for that, and the products of its
    inputs cost as much again; in memory are the text's way through a block, and what its widest site is fitted with.

    windows  -- of the calibration, and the tokens of each
    held_out -- windows that it holds out
    """
    scored = 0
    if request.score and request.calibration is not None:
        attention = request.sparse_attention
        skips = request.thresholds is not None or (attention is not None and attention.sparse)
        each = cost_of(checkpoint, request, skips, windows)
        scored = each.passes * min(held_out * windows[1], each.tokens)
    if not (options := request.fit).fits:
        return Cost(scored or None)
    shapes = [checkpoint.stacked_shape(site, layer) for layer, site in checkpoint.sites]
    # Products as they come and by size, their inverse, and three of that size on the way to it; then new weights.
    site = max(4 * (6 * columns**2 + LIVE * rows * columns) for rows, columns in shapes)
    count, context = fitting_windows(checkpoint, options, windows)
    batch = AT_ONCE.get(options.device.partition(":")[0], AT_ONCE["cpu"]) // context
    size = arithmetic(options.dtype, checkpoint.dtype, options.device).itemsize
    way = block_by_block_bytes(checkpoint, size, (count, context), min(count, max(batch, 1)))
    return Cost(2 * count * context + scored, way + site)


def forecast(request: PackRequest, workers: int = 1) -> PartsForecast:
    """What `pack` would take with so many workers like this process; the output is not written. Some blocks are made as
    `pack` makes them, into a temporary folder, which is deleted: one, or as many as processes of their own are started
    for.

    Raises as `pack` does, and `PackingError` where thresholds would have to be found or weights fitted first.
    """
    request.check()
    request = request.settled()
    request.check_workers(workers)
    first = "finds thresholds" if request.allocation and request.allocation.sparsity > 0 else ""
    first = "fits weights" if request.fit.fits else first
    if first:
        raise PackingError(
            f"--dry-run: pack {first} before it packs, which is not measured; leave it out, or find thresholds by "
            "`sparsepack thresholds`, whose --dry-run measures that, and give --thresholds"
        )
    checkpoint = open_checkpoint(request.model)
    with TemporaryDirectory(prefix="sparsepack-") as folder:
        found = find(checkpoint, request)
        plan = plan_of(checkpoint, request, found)
        blocks = [_of_block(checkpoint, plan, layer) for layer in range(checkpoint.layers)]
        blocks[0][0].data()  # what only the first call takes, such as compiling a kernel
        measured: list[PlannedGroup] = []
        count = 0
        while count < len(blocks) and _bytes(measured) < (FORKED_FROM if plan.at_once == 1 else 1):
            measured += blocks[count]
            count += 1
        began = time.perf_counter()
        write_files([TensorFile(Path(folder) / "blocks", b"", measured)], plan.at_once)
        seconds = time.perf_counter() - began
    whole, source = sum(tensor.nbytes for tensor in plan.tensors), checkpoint.source
    return PartsForecast(
        measured=f"{count} of {checkpoint.layers} blocks: {_bytes(measured) / 1e6:,.1f} MB made, hashed and written in "
        f"{seconds:.2f} s",
        device=request.device,
        workers=workers,
        parts=f"{len(plan.groups)} groups of tensors",
        dealt_seconds=seconds * whole / _bytes(measured),
        alone_seconds=scoring_of(checkpoint, request, found).seconds if request.score else 0.0,
        bytes_read=sum(prod(shape) * source.dtypes[name].itemsize for name, shape in source.shapes.items()),
        bytes_written=plan.total_bytes,
        memory_bytes=memory_so_far(torch.device(request.device)),
        uncounted="reading from a slower disk and hashing the model's files",
    )


def _of_block(checkpoint: Checkpoint, plan: Plan, layer: int) -> list[PlannedGroup]:
    """The groups of one block, whose tensors have its number in their names."""
    prefixes = (f"blk.{layer}.", f"{checkpoint.family.block(layer)}.")
    return [group for group in plan.groups if group.tensors[0].name.startswith(prefixes)]


def _bytes(groups: list[PlannedGroup]) -> int:
    return sum(tensor.nbytes for group in groups for tensor in group.tensors)

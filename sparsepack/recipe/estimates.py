"""Sizes of a model that the dry run reckons with."""

import torch

from sparsepack.models.checkpoint.checkpoint import HEAD, Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.tokenizer.windows import count_windows
from sparsepack.process import peak_memory
from sparsepack.recipe.stage import Job

LIVE = 4
"""This many float32 tensors of a batch's widest activation exist at one time."""


WORKING = 70_000_000
"""Torch takes this many bytes for itself as soon as it works: threads, their buffers, matrices in the order it
likes."""


def process_bytes(job: Job) -> int:
    """What a process takes besides a stage's own tensors; 0 on other devices than the CPU, whose memory is reckoned.

    That is Python, libraries and the tokenizer, all of which this process has by now, and what torch needs to work.
    """
    return WORKING + peak_memory() if job.recipe.device == "cpu" else 0


def parameters(checkpoint: Checkpoint) -> int:
    """The model's parameters, a tied output matrix once."""
    return sum(torch.Size(s).numel() for n, s in checkpoint.source.shapes.items() if n != HEAD or not checkpoint.tied)


def activation_bytes(checkpoint: Checkpoint, tokens: int) -> int:
    """The bytes of so many tokens at the widest place of a block."""
    return tokens * max(sum(checkpoint.stacked_shape(site)) for site in SITES) * LIVE * 4


def block_parameters(checkpoint: Checkpoint) -> int:
    """The parameters of one decoder block."""
    shapes, block = checkpoint.source.shapes, f"{checkpoint.family.block(0)}."
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith(block))


def block_by_block_bytes(job: Job, windows: int, context: int, batch: int) -> int:
    """The bytes of a stage that takes so many windows through one block after the other, `batch` of them at a time."""
    checkpoint, size = job.checkpoint, dtype_bytes(job)
    hidden = windows * context * int(checkpoint.config.hidden_size) * size
    # Rows of the table are taken as it is stored; a block's inputs, its outputs, and these joined are there at once.
    embedding = torch.Size(checkpoint.source.shapes[checkpoint.family.embedding]).numel() * checkpoint.dtype.itemsize
    block = 2 * block_parameters(checkpoint) * size  # the next one is read while one is at work
    return max(embedding + 2 * hidden, block + 3 * hidden + activation_bytes(checkpoint, batch * context))


def trained_tokens(steps: int, batch: int, length: int) -> int:
    """The tokens that a training on the model's output (`calibrate.training`) takes through all blocks: each window
    once, and its second half forwards, forwards again and backwards."""
    return steps * batch * (length + 3 * (length - length // 2))


def dtype_bytes(job: Job) -> int:
    """The bytes of a number in the type that the recipe computes in."""
    return arithmetic(job.recipe.dtype, job.checkpoint.dtype, job.recipe.device).itemsize


def windows_in(job: Job, names: tuple[str, ...], context: int, most: int | None) -> int:
    """Windows of a text that are run: all there are, or `most` of them (None or 0: all)."""
    return count_windows(job.checkpoint.tokenizer, job.text(names), context, most or None)

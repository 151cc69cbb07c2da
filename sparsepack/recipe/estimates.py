"""Sizes of a model that the dry run reckons with."""

import torch

from sparsepack.models.checkpoint import HEAD, Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.windows import count_windows
from sparsepack.recipe.stage import Job

LIVE = 4
"""Float32 tensors of a batch's widest activation that exist at one time."""


def parameters(checkpoint: Checkpoint) -> int:
    """The model's parameters, a tied output matrix once."""
    return sum(torch.Size(s).numel() for n, s in checkpoint.source.shapes.items() if n != HEAD or not checkpoint.tied)


def activation_bytes(checkpoint: Checkpoint, tokens: int) -> int:
    """Of so many tokens at the widest place of a block."""
    return tokens * max(sum(checkpoint.stacked_shape(site)) for site in SITES) * LIVE * 4


def block_parameters(checkpoint: Checkpoint) -> int:
    """Of one decoder block."""
    shapes = checkpoint.source.shapes
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("model.layers.0."))


def dtype_bytes(job: Job) -> int:
    """Of a number in the type that the recipe computes in."""
    return arithmetic(job.recipe.dtype, job.checkpoint.dtype, job.recipe.device).itemsize


def windows_in(job: Job, names: tuple[str, ...], context: int, most: int | None) -> int:
    """Windows of a text that are run: all there are, or `most` of them (None or 0: all)."""
    return count_windows(job.checkpoint.tokenizer, job.text(names), context, most or None)

"""What bounds a stage that takes text through a model block by block: the disk, the bus or the arithmetic."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparsepack.models.architecture import token_weights
from sparsepack.models.family import SITES
from sparsepack.models.stock.blocks import BlockSource, BlockStream
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.progress import EVERY, duration, say
from sparsepack.workers.resume import ResumeState


@contextmanager
def bound_told(label: str, stream: BlockStream, resume: ResumeState) -> Iterator[None]:
    """Say at the end what the blocks of `stream` cost and what bounded the work within, in one line, from times that
    were measured; nothing of work that took less than `progress.EVERY` seconds."""
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if seconds >= EVERY:
        say(f"{label}: {bound_line(seconds, stream, resume)}")


def bound_line(seconds: float, stream: BlockStream, resume: ResumeState) -> str:
    """How long work took, what bounded it, and what each part took of it.

    Reading and moving a block costs only what somebody waited for it; that is shared in the proportion of the two.
    Saving the state counts as the disk's. What is left is the arithmetic's, which is not timed by itself: all that is
    computed, counted and waited for. How many operations of products of blocks with tokens came to a second of it tells
    whether that is what the processor can do.
    """
    ahead = stream.ahead
    fetched = ahead.read_seconds + ahead.moved_seconds
    reading = ahead.waited_seconds * (ahead.read_seconds / fetched if fetched else 0.0)
    bus = "the bus" if stream.device.type != "cpu" else "memory"
    parts = {
        "arithmetic": max(0.0, seconds - ahead.waited_seconds - resume.seconds),
        "the disk": reading + resume.seconds,
        bus: ahead.waited_seconds - reading,
    }
    most = max(parts, key=lambda name: parts[name])
    products = 2 * stream.passed * weights_of_block(stream.source) / max(parts["arithmetic"], 1e-9)
    return (
        f"{duration(seconds)}, bound by {most}: arithmetic {duration(parts['arithmetic'])} (products at "
        f"{products / 1e12:.3g} TFLOP/s), waiting for blocks "
        f"{duration(ahead.waited_seconds)} (read {_rate(ahead.read_bytes, ahead.read_seconds)}, placed "
        f"{_rate(ahead.moved_bytes, ahead.moved_seconds)}), saving {duration(resume.seconds)}"
    )


def weights_of_block(source: BlockSource) -> float:
    """The weights of a block that a token has to do with, the mean over blocks."""
    shapes = parameter_shapes(source.config, source.bases)
    of_blocks = (token_weights(source.config, shapes, layer, site) for layer in range(source.layers) for site in SITES)
    return sum(of_blocks) / source.layers


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.2f} GB at {nbytes / 1e9 / max(seconds, 1e-9):.1f} GB/s"

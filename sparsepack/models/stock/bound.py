"""What bounds a stage that takes text through a model block by block: the disk, the bus or the arithmetic."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparsepack.files.resume import ResumeState
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.progress import EVERY, duration, say


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
    Saving the state counts as the disk's. What is left is the arithmetic's, which is not timed by itself.
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
    return (
        f"{duration(seconds)}, bound by {most}: arithmetic {duration(parts['arithmetic'])}, waiting for blocks "
        f"{duration(ahead.waited_seconds)} (read {_rate(ahead.read_bytes, ahead.read_seconds)}, placed "
        f"{_rate(ahead.moved_bytes, ahead.moved_seconds)}), saving {duration(resume.seconds)}"
    )


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.2f} GB at {nbytes / 1e9 / max(seconds, 1e-9):.1f} GB/s"

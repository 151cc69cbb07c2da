"""What calibrating a model by some workers would take, from one block that is measured here.

Blocks of a model are alike, and each is read while the one before computes. So every block takes as long as reading
takes or computing takes, whichever is longer, and computing takes as long as the worker with the most batches needs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.residual import residual_of
from sparsepack.calibration.run import chosen_windows, computed_in, count_block, settled
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.process import most_so_far
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.workers import ALONE, Workers


@dataclass(frozen=True)
class Forecast:
    """What was measured of a block, and what it comes to.

    device, workers -- what runs it, and how many
    windows, context, batches, batch -- the text, and how many windows run together
    layers          -- blocks of the model
    block_bytes     -- of one block as it is stored
    embedding_bytes -- of the embedding as it is stored
    read_seconds    -- reading a block and bringing it to the device, as often as it was measured here
    batch_seconds   -- one batch through a block, counting included
    rounds          -- batches of the worker that has the most
    memory_bytes    -- of the device while the block was measured, the next one being there; on a CPU of this process
    hidden_bytes    -- hidden states of a worker's windows, in the memory of its machine
    whole_bytes     -- those of all windows, which the first worker holds, too, while it saves them
    sums_bytes      -- sums of products, at the first worker's device
    """

    device: str
    workers: int
    windows: int
    context: int
    batches: int
    batch: int
    layers: int
    block_bytes: int
    embedding_bytes: int
    read_seconds: float
    batch_seconds: float
    rounds: int
    memory_bytes: int
    hidden_bytes: int
    whole_bytes: int
    sums_bytes: int

    @property
    def seconds(self) -> float:
        """The whole run; what workers exchange is not counted."""
        return self.read_seconds + self.layers * max(self.read_seconds, self.rounds * self.batch_seconds)

    @property
    def bytes_read(self) -> int:
        """From the disk, once on each machine."""
        return self.embedding_bytes + self.layers * self.block_bytes


def forecast(
    model: Checkpoint | str | Path, text: Text | str | Sequence[str], options: CalibrateOptions, workers: int = 1
) -> Forecast:
    """What `calibrate` would take with so many workers like this process: its first block is read, and two batches are
    run through it; nothing is written.

    Raises as `calibrate` does, also where a worker would have nothing to do.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    options = settled(checkpoint, options)
    windows = chosen_windows(checkpoint, text if isinstance(text, Text) else read_text(text), options)
    dealt = Dealt(Workers(0, workers), len(windows), options.batch)
    dealt.check("--samples")
    stream = BlockStream(checkpoint, options.device, computed_in(checkpoint, options))
    with torch.inference_mode():
        hidden = stream.embed(windows[: options.batch])
        stream.load(0)
        read_seconds, block_bytes = stream.ahead.waited_seconds, stream.ahead.read_bytes
        stream.ahead.wait()
        batch_seconds = min(_batch_seconds(checkpoint, stream, hidden, options) for _ in range(2))
    embedding = checkpoint.source.shapes[checkpoint.family.embedding]
    width, runs = hidden.shape[-1], (residual_of(checkpoint) or {"runs": 0})["runs"]
    window = windows.shape[1] * width * hidden.itemsize
    return Forecast(
        device=options.device,
        workers=workers,
        windows=len(windows),
        context=windows.shape[1],
        batches=dealt.parts,
        batch=options.batch,
        layers=checkpoint.layers,
        block_bytes=block_bytes,
        embedding_bytes=torch.Size(embedding).numel() * checkpoint.source.dtypes[checkpoint.family.embedding].itemsize,
        read_seconds=read_seconds,
        batch_seconds=batch_seconds,
        rounds=dealt.rounds,
        memory_bytes=_memory(stream.device),
        hidden_bytes=len(dealt.own(torch.arange(len(windows)))) * window,
        whole_bytes=len(windows) * window if workers > 1 else 0,
        sums_bytes=(runs + 1) * 8 * width**2 if runs else 0,
    )


def _batch_seconds(
    checkpoint: Checkpoint, stream: BlockStream, hidden: torch.Tensor, options: CalibrateOptions
) -> float:
    """How long one batch [B, S, H] takes through the loaded block, with all that is counted of it."""
    dealt = Dealt(ALONE, len(hidden), options.batch)
    began = time.perf_counter()
    count_block(checkpoint, stream, 0, hidden.clone(), options, dealt, {}, lambda steps=1: None)
    if stream.device.type == "cuda":
        torch.cuda.synchronize(stream.device)
    return time.perf_counter() - began


def _memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_so_far()

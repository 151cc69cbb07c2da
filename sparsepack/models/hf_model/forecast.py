"""What taking text through a model block by block would take with some workers, from one block that is measured here.

Blocks of a model are alike, and each is read while the one before computes. So every block takes as long as reading
takes or computing takes, whichever is longer. Computing takes as long as the worker with the most batches needs for
them, and then what one worker does while the others wait for it.

What bounds a stage that takes text through a model block by block: the disk, the bus or the arithmetic.

And, without measuring anything, how many bytes such a stage takes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.files.tensors import arithmetic
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import HEAD
from sparsepack.models.hf_config import token_weights
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.model import BlockSource, parameter_shapes
from sparsepack.process import peak_memory
from sparsepack.progress import duration
from sparsepack.workers.shard import Shard


def bound_line(stream: BlockStream, seconds: float, saving: float) -> str:
    """How long work on the blocks of `stream` took, what bounded it, and what each part took of it, `saving` the state
    one of them: seconds that were measured.

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
        "arithmetic": max(0.0, seconds - ahead.waited_seconds - saving),
        "the disk": reading + saving,
        bus: ahead.waited_seconds - reading,
    }
    most = max(parts, key=lambda name: parts[name])
    products = 2 * stream.passed * weights_of_block(stream.source) / max(parts["arithmetic"], 1e-9)
    return (
        f"{duration(seconds)}, bound by {most}: arithmetic {duration(parts['arithmetic'])} (products at "
        f"{products / 1e12:.3g} TFLOP/s), waiting for blocks "
        f"{duration(ahead.waited_seconds)} (read {_rate(ahead.read_bytes, ahead.read_seconds)}, placed "
        f"{_rate(ahead.moved_bytes, ahead.moved_seconds)}), saving {duration(saving)}"
    )


def weights_of_block(source: BlockSource) -> float:
    """The weights of a block that a token has to do with, the mean over blocks."""
    shapes = parameter_shapes(source.config, source.bases)
    layers = range(source.layers)
    sites = ((layer, site) for layer in layers for site in source.family.projections_of(layer))
    return sum(token_weights(source.config, shapes, *key) for key in sites) / source.layers


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.2f} GB at {nbytes / 1e9 / max(seconds, 1e-9):.1f} GB/s"


@dataclass(frozen=True)
class Forecast:
    """What was measured of a block, and what it comes to.

    device, workers -- what runs it, and how many
    windows, context, batches, batch -- the text, and how many windows run together
    layers          -- blocks of the model
    block_bytes     -- of one block as it is stored
    embedding_bytes -- of the embedding as it is stored
    read_seconds    -- reading a block and bringing it to the device, as often as it was measured here
    batch_seconds   -- one batch through a block, as often as the command runs it, counting included
    alone_seconds   -- what a block takes beside its batches, however many they are
    rounds          -- batches of the worker that has the most
    memory_bytes    -- of the device while the block was measured, the next one being there; on a CPU of this process
    hidden_bytes    -- hidden states of a worker's windows, in the memory of its machine or of its GPU
    whole_bytes     -- those of all windows, which the first worker holds, too, while it saves them
    sums_bytes      -- sums of products of several blocks, at the first worker's device
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
    alone_seconds: float
    rounds: int
    memory_bytes: int
    hidden_bytes: int
    whole_bytes: int
    sums_bytes: int

    @property
    def computing_seconds(self) -> float:
        """A block's arithmetic; what workers exchange is not counted."""
        return self.rounds * self.batch_seconds + self.alone_seconds

    @property
    def seconds(self) -> float:
        """The whole run; what workers exchange is not counted."""
        return self.read_seconds + self.layers * max(self.read_seconds, self.computing_seconds)

    @property
    def bytes_read(self) -> int:
        """From the disk, once on each machine."""
        return self.embedding_bytes + self.layers * self.block_bytes


def forecast_blocks(
    checkpoint: Checkpoint,
    stream: BlockStream,
    windows: Tensor,
    shard: Shard,
    run_block: Callable[[Tensor], object],
    sums_bytes: int = 0,
) -> Forecast:
    """Read a model's first block, run one batch and two batches through it, and say what a whole run comes to.

    windows   -- int64 [N, S], all that the run would have
    shard     -- the first one's of them, of as many workers as the run would have
    run_block -- does with hidden states [n, S, H] what one worker alone does with each block; states may change

    Raises `CheckpointError` for a block that cannot be read.
    """
    batch = shard.batch
    hidden = stream.states(windows[:batch], None)
    stream.load(0)
    read_seconds = stream.ahead.waited_seconds
    stream.ahead.wait()
    block_bytes = stream.ahead.read_bytes // min(checkpoint.layers, 2)  # the next one has been read, too

    def seconds(batches: int) -> float:
        states = hidden.repeat(batches, 1, 1)
        began = time.perf_counter()
        run_block(states)
        if stream.device.type == "cuda":
            torch.cuda.synchronize(stream.device)
        return time.perf_counter() - began

    seconds(1)  # what only the first call takes, such as loading a library
    one, two = seconds(1), seconds(2)
    batch_seconds = min(max(two - one, 0.0), one)
    embedding = checkpoint.source.shapes[checkpoint.family.embedding]
    window = windows.shape[1] * hidden.shape[-1] * hidden.itemsize
    return Forecast(
        device=str(stream.device),
        workers=shard.world_size,
        windows=len(windows),
        context=windows.shape[1],
        batches=shard.runs,
        batch=batch,
        layers=checkpoint.layers,
        block_bytes=block_bytes,
        embedding_bytes=torch.Size(embedding).numel() * checkpoint.source.dtypes[checkpoint.family.embedding].itemsize,
        read_seconds=read_seconds,
        batch_seconds=batch_seconds,
        alone_seconds=one - batch_seconds,
        rounds=shard.own_runs,
        memory_bytes=memory_so_far(stream.device),
        hidden_bytes=len(shard.own(torch.arange(len(windows)))) * window,
        whole_bytes=len(windows) * window if shard.world_size > 1 else 0,
        sums_bytes=sums_bytes,
    )


@torch.inference_mode()
def seconds_of_pass(checkpoint: Checkpoint, device: str, tokens: int, of_token: int) -> float:
    """Run a window of so many tokens through the first block, and return the seconds that all blocks would take.

    of_token -- weights of all blocks that a token has to do with
    """
    stream = open_blocks(checkpoint, device, arithmetic("auto", checkpoint.dtype, device))
    hidden = stream.states(torch.zeros(1, tokens, dtype=torch.long), None)
    stream.load(0)
    stream.ahead.wait()

    def seconds() -> float:
        began = time.perf_counter()
        stream(hidden).cpu()  # which waits for a GPU
        return time.perf_counter() - began

    seconds()  # what only the first call takes, such as loading a library
    of_block = sum(checkpoint.token_weights(site, 0) for site in checkpoint.family.projections_of(0))
    return statistics.median(seconds() for _ in range(5)) * of_token / of_block


LIVE = 4
"""This many float32 tensors of a batch's widest activation exist at one time."""


def model_parameters(checkpoint: Checkpoint) -> int:
    """The model's parameters, a tied output matrix once."""
    shapes = checkpoint.source.shapes.items()
    return sum(torch.Size(shape).numel() for name, shape in shapes if name != HEAD or not checkpoint.tied)


def block_parameters(checkpoint: Checkpoint) -> int:
    """The parameters of one decoder block."""
    shapes, block = checkpoint.source.shapes, f"{checkpoint.family.block(0)}."
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith(block))


def activation_bytes(checkpoint: Checkpoint, tokens: int) -> int:
    """The bytes of so many tokens at the widest place of a block."""
    return tokens * max(sum(checkpoint.stacked_shape(site, layer)) for layer, site in checkpoint.sites) * LIVE * 4


def block_by_block_bytes(checkpoint: Checkpoint, size: int, windows: tuple[int, int], batch: int) -> int:
    """The bytes of what takes some windows of so many tokens through one block after the other, `batch` of them at a
    time, in numbers of `size` bytes."""
    hidden = windows[0] * windows[1] * int(checkpoint.config.hidden_size) * size
    # Rows of the table are taken as it is stored; a block's inputs, its outputs, and these joined are there at once.
    embedding = torch.Size(checkpoint.source.shapes[checkpoint.family.embedding]).numel() * checkpoint.dtype.itemsize
    block = 2 * block_parameters(checkpoint) * size  # the next one is read while one is at work
    return max(embedding + 2 * hidden, block + 3 * hidden + activation_bytes(checkpoint, batch * windows[1]))


def memory_so_far(device: torch.device) -> int:
    """The most memory that a device had; a CPU: this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()

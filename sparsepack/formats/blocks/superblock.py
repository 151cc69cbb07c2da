"""What the codecs of blocks share: which inputs they take, and how much they hold at once.

Blocks are superblocks of 256 weights unless told otherwise.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks.table import BLOCKS

BLOCK = 256
FP16_MAX = 65504.0

# Weights per chunk. A CPU chunk is short enough for the caches and long enough to hide Python; a CUDA chunk hides the
# launches of its operations. Either holds about 20 bytes of temporaries per weight: 5 MB per CPU thread, 300 MB.
CPU_WEIGHTS_AT_ONCE = 1 << 18
CUDA_WEIGHTS_AT_ONCE = 1 << 24

# A divisor at or below this counts as zero: its reciprocal would leave float32, and what it divides is far
# below the smallest number that a superblock can hold (2**-24).
TINY = 1e-30


def for_each_chunk(blocks: int, device: torch.device, work: Callable[[slice], None], block: int = BLOCK) -> None:
    """Call `work` on slices that cover so many blocks of `block` weights, each as many as the device works on at once.

    On the CPU whole chunks run side by side, one torch thread each. Splitting every small operation over the threads
    instead waits for the slowest at each of them: several times slower when another process takes a core now and then.
    """
    step = (CPU_WEIGHTS_AT_ONCE if device.type == "cpu" else CUDA_WEIGHTS_AT_ONCE) // block
    parts = [slice(start, min(start + step, blocks)) for start in range(0, blocks, step)]
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not parts:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()

    def alone(part: slice) -> None:
        with torch.inference_mode(inference):  # each thread has a mode of its own
            work(part)

    try:
        with ThreadPoolExecutor(min(threads, len(parts)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)  # each worker's setting is also the default of threads that start later


def largest(weights: Tensor) -> float:
    """Largest magnitude in `weights`: one pass, one transfer from the device.

    Raises PackingError where a weight is not a floating-point number, or is infinite or NaN.
    """
    if not weights.is_floating_point():
        raise PackingError(f"weights: {weights.dtype}, expected float32, float16 or bfloat16; convert them first")
    if weights.numel() == 0:
        return 0.0
    # amin and amax propagate NaN.
    low, high = torch.stack([bound.float() for bound in torch.aminmax(weights)]).tolist()
    magnitude = float(max(-low, high))
    if not low > float("-inf") or not high < float("inf"):
        count = int((~torch.isfinite(weights)).sum())
        raise PackingError(
            f"weights {list(weights.shape)}: {count} of {weights.numel()} are infinite or NaN, expected finite; "
            "the checkpoint is damaged or overflowed in a conversion: fetch or convert it again"
        )
    return magnitude


def encode_chunks(
    count: int, block_bytes: int, device: torch.device, encode: Callable[[slice], Tensor], block: int = BLOCK
) -> Tensor:
    """So many encoded blocks, made in chunks: uint8 [count, block_bytes]; `encode` makes those of a slice of them."""
    blocks = torch.empty(count, block_bytes, dtype=torch.uint8, device=device)

    def work(part: slice) -> None:
        blocks[part] = encode(part)

    for_each_chunk(count, device, work, block)
    return blocks


@dataclass(frozen=True)
class Parts:
    """Superblocks of 256 weights taken apart, whose pieces an order may put elsewhere: uint8.

    shared  -- [n, bytes] what all weights of a superblock share, float16 numbers; of short blocks nothing
    each    -- [n, sub-blocks, bytes] what those of a sub-block share
    numbers -- [n, 256] the weights' own, from 0 on; where sub-blocks have no minimum, half as many stand for zero
    """

    shared: Tensor
    each: Tensor
    numbers: Tensor


def _not_apart(given: object) -> Any:
    raise PackingError("blocks of this type have no orders but rows")


@dataclass(frozen=True)
class BlockCodec:
    """A type of ggml's: weights along the last dimension in blocks that are quantised each by itself.

    name         -- ggml's, of a row of `table.BLOCKS`
    encode_chunk -- floats [n, block], and the largest magnitude of all weights -> uint8 [n, block_bytes]
    decode_chunk -- uint8 [n, block_bytes] -> float32 [n, block]
    apart        -- superblocks, uint8 [n, bytes] -> their parts
    together     -- the inverse
    bits         -- of a number in these parts
    encode_given -- floats [n, 256], and the `shared` to keep of each superblock, uint8 [n, bytes] -> superblocks
    zigzag       -- superblocks of a finite matrix's columns by a kernel of its device (`q4_k_device.encode`): floats
                    [rows, columns], and what each row is divided by first, or None -> uint8 [bands * columns, bytes];
                    None: it has none
    decode_level -- of blocks with planes: `decode_chunk` by a reader of so many
    """

    name: str
    encode_chunk: Callable[[Tensor, float], Tensor]
    decode_chunk: Callable[[Tensor], Tensor]
    apart: Callable[[Tensor], Parts] = _not_apart
    together: Callable[[Parts], Tensor] = _not_apart
    bits: int = 0
    encode_given: Callable[[Tensor, Tensor], Tensor] | None = None
    zigzag: Callable[[Tensor, Tensor | None], Tensor | None] = lambda weight, divisors: None
    decode_level: Callable[[Tensor, int], Tensor] | None = None

    def encode(self, weights: Tensor) -> Tensor:
        """Quantise along the last dimension.

        weights: float32, float16 or bfloat16 [..., n * block]. Returns uint8 [..., n * block_bytes] on the same device.
        Minimises the squared error, every weight counting the same. Weights beyond what the format holds become its
        largest; a block of zeros decodes to zeros.

        Raises PackingError for weights that are not finite, or not whole blocks.
        """
        block, block_bytes = BLOCKS[self.name].weights, BLOCKS[self.name].bytes
        if weights.dim() == 0 or weights.shape[-1] % block:
            raise PackingError(
                f"weights {list(weights.shape)}: {self.name} needs a multiple of {block} in the last dimension; "
                "pad it with zeros and record the logical length"
            )
        most = largest(weights)
        flat = weights.detach().reshape(-1, block)
        blocks = self.zigzag(flat.t(), None)
        if blocks is None:
            chunk = partial(self._encoded, flat, most)
            blocks = encode_chunks(len(flat), block_bytes, weights.device, chunk, block)
        return blocks.view(*weights.shape[:-1], weights.shape[-1] // block * block_bytes)

    def _encoded(self, flat: Tensor, most: float, part: slice) -> Tensor:
        return self.encode_chunk(flat[part], most)

    def decode(self, blocks: Tensor, dtype: torch.dtype = torch.float32, level: int = 0) -> Tensor:
        """Dequantise: uint8 [..., n * block_bytes] -> `dtype` [..., n * block], in float32 as ggml does, then rounded.

        level -- of blocks with planes, how many are read; 0: all

        Raises PackingError where `blocks` is not uint8 or not whole blocks.
        """
        block, block_bytes = BLOCKS[self.name].weights, BLOCKS[self.name].bytes
        if blocks.dtype != torch.uint8:
            raise PackingError(f"{self.name} blocks: {blocks.dtype}, expected torch.uint8; view them as bytes")
        if blocks.dim() == 0 or blocks.shape[-1] % block_bytes:
            raise PackingError(
                f"{self.name} blocks {list(blocks.shape)}: the last dimension must be a multiple of {block_bytes} "
                "bytes; the tensor is of another format or cut off"
            )
        flat = blocks.reshape(-1, block_bytes)
        weights = torch.empty(len(flat), block, dtype=dtype, device=blocks.device)

        def work(part: slice) -> None:
            if level and self.decode_level is not None:
                weights[part] = self.decode_level(flat[part], level)
            else:
                weights[part] = self.decode_chunk(flat[part])

        for_each_chunk(len(flat), blocks.device, work, block)
        return weights.view(*blocks.shape[:-1], blocks.shape[-1] // block_bytes * block)


@dataclass(frozen=True)
class FloatCodec:
    """Single numbers of one of torch's types."""

    name: str
    stored: torch.dtype

    def encode(self, weights: Tensor) -> Tensor:
        """floats [..., columns] -> uint8 [..., bytes]. Raises `PackingError` for weights that are not finite, or that
        the type cannot hold."""
        beyond = largest(weights)
        stored = weights.detach().to(self.stored).contiguous()
        if not torch.isfinite(stored).all():
            raise PackingError(f"the weight {beyond:g} is beyond what {self.name} holds; choose bf16 or f32")
        return stored.view(torch.uint8)

    def decode(self, blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [..., bytes] -> `dtype` [..., columns]."""
        return blocks.contiguous().view(self.stored).to(dtype)


FLOATS: Mapping[str, FloatCodec] = {
    codec.name: codec
    for codec in (
        FloatCodec("F16", torch.float16),
        FloatCodec("BF16", torch.bfloat16),
        FloatCodec("F32", torch.float32),
    )
}


def superblocks_first(flat: Tensor) -> Tensor:
    """A float32 copy [256, n] of superblocks [n, 256]: sums within superblocks then run over the outer dimension."""
    columns = torch.empty(BLOCK, flat.shape[0], dtype=torch.float32, device=flat.device)
    # Casting before transposing keeps the strided copy between equal types, which torch does several times faster.
    return columns.copy_((flat.float() if flat.device.type == "cpu" else flat).t())


def sum_squares(q: Tensor, scratch: Tensor, out: Tensor) -> None:
    """Sums of squares of whole numbers over dimension 1, exact: [subs, numbers, n] -> out [subs, n]."""
    if q.is_cuda:
        # One pass where the product and its sum are three; exact once rounded. CPUs do not vectorise it.
        torch.linalg.vector_norm(q, dim=1, out=out)
        out.square_().round_()
    else:
        torch.sum(torch.mul(q, q, out=scratch), 1, out=out)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is too small to divide by."""
    return torch.where(x > TINY, 1 / x, 0)


def sum_subs(x: Tensor) -> Tensor:
    """[..., sub-blocks, n] -> [..., n], in halves: torch.sum's order would depend on where in a chunk n lies."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return x.squeeze(-2)


def fp16(x: Tensor) -> Tensor:
    """`x`, not negative, as float32 of the nearest finite float16."""
    return x.clamp_max(FP16_MAX).half().float()


def next_fp16(x: Tensor) -> Tensor:
    """The float16 just above `x`, itself a float16 that is not negative, as float32."""
    return (x.half().view(torch.int16) + 1).view(torch.float16).float().clamp_max(FP16_MAX)


def fp16_bytes(x: Tensor) -> Tensor:
    """float32 [n] -> the two bytes, low first, of each float16: uint8 [2, n]."""
    return x.half().view(torch.uint8).view(-1, 2).t()


def fp16_from_bytes(pairs: Tensor) -> Tensor:
    """uint8 [n, 2], low byte first -> float32 [n, 1]."""
    return pairs.contiguous().view(torch.float16).float()

"""Q8_0: 32 weights in 34 bytes, 8.5 bits each; the bytes that ggml and every GGUF reader know.

    byte    0    1    2 .. 33
          +--------+----------------+
          | d fp16 | 32 q, int8     |
          +--------+----------------+

    weight = d * q

Its blocks are short, so that it fits widths that the superblocks of Q4_K and Q6_K do not. The encoder's d is the better
of the two float16 next to what the largest weight of the block needs, q is what is then nearest; a block of zeros
becomes 34 zero bytes.
"""

import torch
from torch import Tensor

from sparsepack.formats.blocks.superblock import (
    FP16_MAX,
    BlockCodec,
    Parts,
    fp16,
    fp16_bytes,
    fp16_from_bytes,
    next_fp16,
)
from sparsepack.formats.blocks.table import BLOCKS

BLOCK_BYTES = BLOCKS["Q8_0"].bytes
STEPS = 127

HIGHEST = FP16_MAX * STEPS
"""The format can hold weights up to this size on either side."""


def _decode(blocks: Tensor) -> Tensor:
    return fp16_from_bytes(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def _encode(x: Tensor, largest: float) -> Tensor:
    """Floats [n, 32] -> uint8 [n, 34]."""
    x = x.float()
    d = fp16(x.abs().amax(1) / STEPS)
    low, high = _nearest(x, d), _nearest(x, above := next_fp16(d))
    better = (_loss(x, high, above) < _loss(x, low, d)) & (d > 0)
    d, q = torch.where(better, above, d), torch.where(better[:, None], high, low)
    return torch.cat([fp16_bytes(d).t(), q.to(torch.int8).view(torch.uint8)], dim=1)


def _nearest(x: Tensor, d: Tensor) -> Tensor:
    return torch.where(d > 0, 1 / d, 0)[:, None].mul(x).round_().clamp_(-STEPS, STEPS)


def _loss(x: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """Squared error in units of the largest weight, whose square float32 may not hold."""
    return ((q * d[:, None] - x) / x.abs().amax(1, keepdim=True).clamp_min(1e-30)).square_().sum(1)


def _apart(superblocks: Tensor) -> Parts:
    """Eight blocks each: uint8 [n, 272]."""
    blocks = superblocks.view(len(superblocks), -1, BLOCK_BYTES)
    return Parts(superblocks[:, :0], blocks[..., :2], blocks[..., 2:].flatten(1) ^ 128)


def _together(parts: Parts) -> Tensor:
    return torch.cat([parts.each, parts.numbers.view(*parts.each.shape[:2], -1) ^ 128], dim=2).flatten(1)


CODEC = BlockCodec("Q8_0", _encode, _decode, _apart, _together, bits=8)
encode, decode = CODEC.encode, CODEC.decode

"""Q8_0: 32 weights in 34 bytes, 8.5 bits each; the bytes that ggml and every GGUF reader know.

    byte    0    1    2 .. 33
          +--------+----------------+
          | d fp16 | 32 q, int8     |
          +--------+----------------+

    weight = d * q

Its blocks are short, so that it fits widths that the superblocks of Q4_K and Q6_K do not.
"""

import torch
from torch import Tensor

from sparsepack.formats.codecs.superblock import (
    FP16_MAX,
    decode_blocks,
    encode_blocks,
    fp16,
    fp16_bytes,
    fp16_from_bytes,
    next_fp16,
)

BLOCK = 32
BLOCK_BYTES = 34
STEPS = 127

HIGHEST = FP16_MAX * STEPS
"""The format can hold weights up to this size on either side."""


def encode(weights: Tensor) -> Tensor:
    """Quantise along the last dimension.

    weights: float32, float16 or bfloat16 [..., K], K a multiple of 32. Returns uint8 [..., K / 32 * 34] on the same
    device. d is the better of the two float16 next to what the largest weight of the block needs, q what is then
    nearest. Weights beyond what the format holds become its largest; a block of zeros becomes 34 zero bytes.

    Raises PackingError for weights that are not finite, or a K that 32 does not divide.
    """
    return encode_blocks(weights, BLOCK, BLOCK_BYTES, "Q8_0", _encode)


def decode(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise: uint8 [..., n * 34] -> `dtype` [..., n * 32], computed in float32 as ggml does, then rounded.

    Raises PackingError where `blocks` is not uint8 or not whole blocks.
    """
    return decode_blocks(blocks, dtype, BLOCK_BYTES, "Q8_0", _decode, BLOCK)


def _decode(blocks: Tensor) -> Tensor:
    return fp16_from_bytes(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def _encode(x: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 34]."""
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

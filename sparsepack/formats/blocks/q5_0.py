"""Q5_0: 32 weights in 22 bytes, 5.5 bits each; the bytes that ggml and every GGUF reader know.

    byte    0    1    2 .. 5                    6 .. 21
          +--------+-------------------------+--------------------------+
          | d fp16 | high bits of q, one each | low 4 bits of q          |
          +--------+-------------------------+--------------------------+

    weight = d * (q - 16)

    bit i of the 32 high bits   weight i
    byte 6 + i                  low nibble: weight i, high nibble: weight 16 + i

llama.cpp stores in it what Q4_K does not fit, since its blocks are short. The encoder takes, of a few steps, the one
with the least squared error; a block of zeros has d = 0.
"""

import torch
from torch import Tensor

from sparsepack.formats.blocks.superblock import FP16_MAX, BlockCodec, fp16_bytes, fp16_from_bytes

BLOCK = 32
LEVELS = (16.0, 15.5, 15.0, 14.5)
"""These numbers of steps on the side of the largest weight are tried; 16 are there, but 15 on the other side."""

LOWEST, HIGHEST = -FP16_MAX * 16, FP16_MAX * 16
"""The format can hold weights between these two."""


def _decode(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    high = (blocks[:, 2:6, None] >> bits & 1).view(-1, BLOCK)
    q = torch.cat([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], dim=1) | high << 4
    return fp16_from_bytes(blocks[:, :2]) * (q.float() - 16)


def _encode(x: Tensor, largest: float) -> Tensor:
    """Floats [n, 32] -> uint8 [n, 22]."""
    x = x.float()
    most = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    scale = most.abs().clamp_min(1e-30)[:, None]
    tried = torch.stack([(most / -levels).clamp(-FP16_MAX, FP16_MAX).half().float() for levels in LEVELS])
    numbers = [_nearest(x, d) for d in tried]
    losses = [((q * d[:, None] - x) / scale).square_().sum(1) for q, d in zip(numbers, tried, strict=True)]
    best = torch.stack(losses).argmin(0)
    d = tried.gather(0, best[None])[0]
    q = (_nearest(x, d) + 16).to(torch.uint8)
    bits = torch.arange(8, device=x.device, dtype=torch.uint8)
    high = ((q >> 4).view(-1, 4, 8) << bits).sum(2, dtype=torch.uint8)
    return torch.cat([fp16_bytes(d).t(), high, (q[:, :16] & 15) | (q[:, 16:] & 15) << 4], dim=1)


def _nearest(x: Tensor, d: Tensor) -> Tensor:
    return torch.where(d != 0, 1 / d, 0)[:, None].mul(x).round_().clamp_(-16, 15)


CODEC = BlockCodec("Q5_0", _encode, _decode)
encode, decode = CODEC.encode, CODEC.decode

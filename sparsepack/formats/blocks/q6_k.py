"""Q6_K: 256 weights in 210 bytes, 6.5625 bits each; the bytes that ggml and every GGUF reader know.

    byte    0 .. 127                128 .. 191             192 .. 207          208 209
          +------------------------+----------------------+-------------------+--------+
          | low 4 bits of 256 q    | high 2 bits of 256 q | 16 scales, int8   | d fp16 |
          +------------------------+----------------------+-------------------+--------+

    weight = d * scale[j] * (q - 32)                    j: which of the sixteen sub-blocks of 16 weights

    h = 0, 1: which half of the superblock, 128 weights each
    byte       64 h + l   low nibble: low bits of weight l of the half, high nibble: of weight 64 + l     l = 0 .. 63
    byte 128 + 32 h + l   bits 0-1, 2-3, 4-5, 6-7: high bits of weights l, 32 + l, 64 + l, 96 + l         l = 0 .. 31

`encode` works as Q4_K's does, without a min: weights become integers of 16 bits relative to the largest of their
sub-block (sums are then exact in any order), a few numbers of levels place the grid, least squares fits the scale,
the best wins; d is the best of a few, scales are rounded to eight bits, and q, scales and d are made best once more.
A superblock of zeros becomes q = 0 with zero scales and d, the format's only zero. The CPU's kernels write the same
bytes.
"""

from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.blocks.cpu_encoder import encode_on_cpu
from sparsepack.formats.blocks.superblock import (
    BLOCK,
    FP16_MAX,
    BlockCodec,
    Parts,
    fp16,
    fp16_bytes,
    fp16_from_bytes,
    next_fp16,
    reciprocal,
    sum_squares,
    sum_subs,
    superblocks_first,
)
from sparsepack.formats.blocks.table import BLOCKS

BLOCK_BYTES = BLOCKS["Q6_K"].bytes

SUB = 16
SUBS = BLOCK // SUB
STEPS = 32767  # 16 * 32 * 32767 < 2**24: sums of q y are exact

# Levels on the side of the largest weight. Fewer than the 32 that the format has move the grid; the set was chosen
# greedily as in Q4_K, from 28, 28 1/8 .. 36 and with weights clustered around one value as well.
LEVELS = (32.0, 31.375, 30.75, 30.0, 31.75, 29.125, 28.125, 32.375, 31.625)
# Where the grids are equally good (equal weights), rounding must not decide: neighbours should share one.
FIRST_BONUS = 1 + 4e-7

# The largest weight that the format can hold on either side: 127 * 31 * d.
HIGHEST = FP16_MAX * 127 * 31


def _numbers(blocks: Tensor) -> Tensor:
    """q of superblocks: uint8 [n, 210] -> uint8 [n, 256], 0 .. 63."""
    low = blocks[:, :128].view(-1, 2, 1, 64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    q = torch.cat([low & 15, low >> 4], dim=2).view(-1, BLOCK)
    return q | torch.cat([high << 4, high << 2, high, high >> 2], dim=2).view(-1, BLOCK) & 48


def _decode(blocks: Tensor) -> Tensor:
    q = _numbers(blocks)
    s = fp16_from_bytes(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8)
    return (q.view(-1, SUBS, SUB).float().sub_(32) * s[:, :, None]).view(-1, BLOCK)


def _encode(flat: Tensor, largest: float, given: Tensor | None = None) -> Tensor:
    """Floats [n, 256], none beyond `largest` -> uint8 [n, 210]; superblocks stand in columns meanwhile.

    given -- the d to keep of each, float32 [n]
    """
    y = superblocks_first(flat).view(SUBS, SUB, -1)
    if largest > HIGHEST:
        y.clamp_(-HIGHEST, HIGHEST)
    # weight = unit * y; unit has the sign that makes y -STEPS at the largest weight: q reaches -32 but only 31.
    least, most = y.amin(1), y.amax(1)  # [16, n]
    unit = torch.where(-least >= most, -least, -most).div_(STEPS)
    y.mul_(_signed_reciprocal(unit)[:, None]).round_()

    q, scratch = torch.empty_like(y), torch.empty_like(y)
    sums = torch.stack([_sums(y, _nearest(y, levels / STEPS, q), scratch) for levels in LEVELS], dim=1)
    qq, qy = sums  # [grids, 16, n]
    gain = qy.square().div_(qq.clamp_min(1))
    gain[0] *= FIRST_BONUS
    best = gain.argmax(0)
    qq, qy = sums.gather(1, best.expand(2, 1, -1, -1)).squeeze(1)
    qy = qy * unit
    d = _shared_scale(qq, qy) if given is None else given
    scale, _ = _rounded(qq, qy, d)

    qq, qy = _sums(y, _nearest(y, (unit * _signed_reciprocal(scale * d))[:, None], q), scratch)
    qy = qy * unit
    scale, loss = _rounded(qq, qy, d)
    d = _refined(qq, qy, scale, d, loss) if given is None else given

    q = _nearest(y, (unit * _signed_reciprocal(scale * d))[:, None], q).add_(32).to(torch.uint8)
    return _pack(d, scale.to(torch.int8), q.view(2, BLOCK // 2, -1)).t()


def _nearest(y: Tensor, factor: Tensor | float, out: Tensor) -> Tensor:
    return torch.mul(y, factor, out=out).round_().clamp_(-32, 31)


def _sums(y: Tensor, q: Tensor, scratch: Tensor) -> Tensor:
    """Sums of q q and q y over each sub-block: [2, 16, n]. Overwrites q."""
    out = torch.empty(2, y.shape[0], y.shape[2], device=y.device)
    sum_squares(q, scratch, out[0])
    torch.sum(q.mul_(y), 1, out=out[1])
    return out


def _shared_scale(qq: Tensor, qy: Tensor) -> Tensor:
    """d [n] for the least-squares scales of the sub-blocks: the best of four."""
    s = qy / qq.clamp_min(1)
    most = s.gather(0, s.abs().argmax(0, keepdim=True))[0]
    # -128 is one more than 127. Room above the largest scale serves where float16 is coarse, near 2**-24.
    sizes = [fp16(most.abs() / steps) for steps in (128, 127, 124)]
    sizes.append(next_fp16(sizes[1]))
    d = torch.stack(sizes).mul_(torch.where(most > 0, -1.0, 1.0))
    _, loss = _rounded(qq, qy, d[:, None])
    return d.gather(0, loss.argmin(0, keepdim=True))[0]


def _loss(s: Tensor, qq: Tensor, qy: Tensor) -> Tensor:
    """Squared error with scales s [..., 16, n] above the least possible for these q: [..., n].

    In differences: sums of squares would lose in float32 what distinguishes two neighbouring d.
    """
    return sum_subs((s - qy / qq.clamp_min(1)).square_().mul_(qq))


def _rounded(qq: Tensor, qy: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of eight bits [..., 16, n] that suit q with these sums best, and their loss."""
    scale = (qy * _signed_reciprocal(qq * d)).round_().clamp_(-128, 127)
    return scale, _loss(scale * d, qq, qy)


def _refined(qq: Tensor, qy: Tensor, scale: Tensor, d: Tensor, loss: Tensor) -> Tensor:
    """d [n] by least squares over the superblock with all else held; the old one where that is no better."""
    new = sum_subs(scale * qy) / sum_subs(scale.square() * qq).clamp_min_(1)
    new = new.clamp_(-FP16_MAX, FP16_MAX).half().float()
    return torch.where(_loss(scale * new, qq, qy) < loss, new, d)


def _signed_reciprocal(x: Tensor) -> Tensor:
    return reciprocal(x.abs()).copysign_(x)


def _pack(d: Tensor, scale: Tensor, q: Tensor) -> Tensor:
    """float32 d [n], int8 scale [16, n], uint8 q [2, 128, n] in 0 .. 63 -> uint8 [210, n]."""
    blocks = torch.empty(BLOCK_BYTES, d.shape[0], dtype=torch.uint8, device=d.device)
    torch.bitwise_or(q[:, :64] & 15, q[:, 64:] << 4, out=blocks[:128].view(2, 64, -1))
    high = (q >> 4).view(2, 4, 32, -1)
    high = high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6)
    blocks[128:192] = high.view(64, -1)
    blocks[192:208] = scale.view(torch.uint8)
    # Nothing is left of a d whose scales are all zero: equal weights, equal bytes.
    blocks[208:210] = fp16_bytes(torch.where((scale != 0).any(0), d, 0))
    return blocks


def _apart(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 208:], blocks[:, 192:208, None], _numbers(blocks))


def _together(parts: Parts) -> Tensor:
    q = parts.numbers.view(-1, 2, 2, 64)
    low = (q[:, :, 0] & 15) | q[:, :, 1] << 4
    high = (parts.numbers >> 4).view(-1, 2, 4, 32)
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([low.flatten(1), high.flatten(1), parts.each.flatten(1), parts.shared], dim=1)


def _encode_given(flat: Tensor, shared: Tensor) -> Tensor:
    blocks = _encode(flat, float(flat.abs().max()), shared.contiguous().view(torch.float16).float().view(-1))
    blocks[:, 208:] = shared
    return blocks


CODEC = BlockCodec("Q6_K", _encode, _decode, _apart, _together, 6, _encode_given, zigzag=partial(encode_on_cpu, "Q6_K"))
encode, decode = CODEC.encode, CODEC.decode

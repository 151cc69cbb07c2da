"""Q6_P: 256 weights in 204 bytes, 6.375 bits each, as nested planes. Ours; no other program knows it.

    byte    0    1    2    3    4 .. 7       8 .. 11      12 .. 75   76 .. 107   108 .. 139   140 .. 171   172 .. 203
          +---------+---------+------------+------------+----------+-----------+------------+------------+------------+
          | d fp16  | c fp16  | 4 s, uint8 | 4 m, int8  | plane 1  | plane 2   | plane 3    | plane 4    | plane 5    |
          +---------+---------+------------+------------+----------+-----------+------------+------------+------------+

    weight = d * s[g] * T(q) / 256 + c * m[g]           g: which of the four groups of 64 weights

q has 6 bits, of which plane 1 holds the highest two and each other plane the next one. Bits 2 g and 2 g + 1 of byte i
of plane 1 are those of weight 64 g + i. Of a plane of one bit, bit 2 g of byte i is that of weight 64 g + i, and bit
2 g + 1 that of weight 64 g + 32 + i: two of them make one like plane 1 by a shift of halves.

A reader may stop after any plane: level l knows the upper l + 1 bits of q, by the same scales, and takes for T a number
in the middle of what they leave open, in quarters of a step of the finest grid:

    level 1   60 q - 90          level 3   16 q - 120         level 5   4 q - 126
    level 2   32 q - 112         level 4    8 q - 124

Level 1 has 60 in place of 64 because weights within a group have a bell's shape, whose outer codes are not full: of
SmolLM2-135M it leaves 3.6 % less squared error, and a number for each code no more than 0.5 % less again.

A grid spans a group's smallest to its largest weight, zero included, or a little less where the squared error, of all
levels by how large the inputs are that read them, is smaller so.
Any-Precision LLM (Park et al., 2024) reads nested codes at one precision for a whole model.
"""

import torch
from torch import Tensor

from sparsepack.formats.blocks.superblock import (
    BLOCK,
    FP16_MAX,
    BlockCodec,
    Parts,
    fp16,
    fp16_bytes,
    fp16_from_bytes,
    reciprocal,
)
from sparsepack.formats.blocks.table import BLOCKS

BLOCK_BYTES = BLOCKS["Q6_P"].bytes
GROUP = 64
GROUPS = BLOCK // GROUP
HEADER, FIRST = 12, 64
MIDDLE, QUARTERS = 126, 4
SCALES, CENTRES = 255, 127
FRACTION = 1 / 256
"""Of d: weights of usual sizes then have a d that float16 holds with all its bits."""

LEVELS = BLOCKS["Q6_P"].levels
STEPS = (60, 32, 16, 8, 4)
"""T of each level's numbers, from one to the next, by the bits of q that it knows."""

SHARES = (0.05, 0.15, 0.25, 0.3, 0.25)
"""Of the squared inputs of SmolLM2-135M, those whose columns are read at each level where a token reads 3.4 bits."""

SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.78)
"""Parts of the whole range that are tried."""

HIGHEST = FP16_MAX * FRACTION * SCALES * MIDDLE
"""Weights up to this size on either side can be held."""


def at_level(numbers: Tensor, level: int) -> Tensor:
    """T of q, uint8 [...], as a level, 1 to 5, knows it: float32 [...]."""
    bits, step = LEVELS[level - 1], STEPS[level - 1]
    return (numbers >> LEVELS[-1] - bits).float().mul_(step).sub_(step * (2**bits - 1) / 2)


def decode_level(blocks: Tensor, level: int) -> Tensor:
    """Superblocks as a reader of so many planes has them: uint8 [n, 204] -> float32 [n, 256]."""
    parts = _apart(blocks)
    d, c = fp16_from_bytes(blocks[:, :2]) * FRACTION, fp16_from_bytes(blocks[:, 2:4])
    s, m = parts.each[..., 0], parts.each[..., 1].view(torch.int8)
    points = at_level(parts.numbers, level).view(-1, GROUPS, GROUP)
    return (points.mul_((d * s)[..., None]).add_((c * m)[..., None])).view(-1, BLOCK)


def _decode(blocks: Tensor) -> Tensor:
    return decode_level(blocks, len(LEVELS))


def _encode(x: Tensor, largest: float, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Floats [n, 256] -> uint8 [n, 204].

    given -- d and c to keep of each, float32 [n, 1]
    """
    x = x.float().view(-1, GROUPS, GROUP)
    if largest > HIGHEST:
        x = x.clamp(-HIGHEST, HIGHEST)
    low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
    best: list[Tensor] = []
    for shrink in SHRINKS:
        quarter, centre = (high / 2 - low / 2) * (shrink / MIDDLE), (high / 2 + low / 2) * shrink
        d = fp16(quarter.amax(1, keepdim=True) / (SCALES * FRACTION)) if given is None else given[0]
        c = fp16(centre.abs().amax(1, keepdim=True) / CENTRES) if given is None else given[1]
        s = (quarter * reciprocal(d * FRACTION)).round_().clamp_(0, SCALES)
        m = (centre * reciprocal(c)).round_().clamp_(-CENTRES, CENTRES)
        unit, middle = (d * FRACTION * s)[..., None], (c * m)[..., None]
        q = ((x - middle) * reciprocal(unit)).add_(MIDDLE).div_(QUARTERS).round_().clamp_(0, 63).to(torch.uint8)
        loss = torch.zeros_like(s)
        for level, share in enumerate(SHARES, 1):
            error = at_level(q, level).mul_(unit).add_(middle).sub_(x)
            loss += share * _relative(error, quarter)
        found = [loss.sum(1), d, c, s, m, q]
        if best:
            better = (found[0] < best[0])[:, None]
            where = [better[:, 0], *[better] * 4, better[..., None]]
            found = [torch.where(*each) for each in zip(where, found, best, strict=True)]
        best = found
    _, d, c, s, m, q = best
    each = torch.stack([s.to(torch.uint8), m.to(torch.int8).view(torch.uint8)], dim=2)
    return _together(Parts(torch.cat([fp16_bytes(d[:, 0]), fp16_bytes(c[:, 0])]).t(), each, q.flatten(1)))


def _relative(error: Tensor, quarter: Tensor) -> Tensor:
    """Sums of squares over groups in units of a superblock's largest step, whose square float32 may not hold."""
    unit = quarter.amax(1, keepdim=True).clamp_min(1e-30)[..., None]
    return (error / unit).square_().sum(-1)


def _apart(blocks: Tensor) -> Parts:
    shifts = 2 * torch.arange(GROUPS, dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = blocks[:, None, HEADER : HEADER + FIRST] >> shifts & 3
    single = blocks[:, HEADER + FIRST :].view(-1, len(LEVELS) - 1, 1, 1, FIRST // 2)
    bits = single >> shifts[..., None] + torch.arange(2, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    for plane in bits.unbind(1):
        numbers = numbers << 1 | plane.flatten(2)
    each = blocks[:, 4:HEADER].view(-1, 2, GROUPS).transpose(1, 2)
    return Parts(blocks[:, :4], each, numbers.flatten(1))


def _together(parts: Parts) -> Tensor:
    q = parts.numbers.view(-1, GROUPS, GROUP)
    each = parts.each.transpose(1, 2).reshape(-1, 2 * GROUPS)
    planes = [_bits(q >> 4, range(0, 8, 2))]
    for bit in (3, 2, 1, 0):
        planes.append(_bits((q >> bit & 1).view(-1, 2 * GROUPS, FIRST // 2), range(8)))
    return torch.cat([parts.shared, each, *planes], dim=1)


def _bits(numbers: Tensor, places: range) -> Tensor:
    """A plane of numbers [n, k, m], the k-th of a byte shifted to the k-th place: uint8 [n, m]."""
    plane = torch.zeros_like(numbers[:, 0])
    for of_place, place in zip(numbers.unbind(1), places, strict=True):
        plane |= of_place << place
    return plane


def _encode_given(flat: Tensor, shared: Tensor) -> Tensor:
    d, c = fp16_from_bytes(shared[:, :2]), fp16_from_bytes(shared[:, 2:])
    blocks = _encode(flat, float(flat.abs().max()), (d, c))
    blocks[:, :4] = shared
    return blocks


CODEC = BlockCodec("Q6_P", _encode, _decode, _apart, _together, 6, _encode_given, decode_level=decode_level)
encode, decode = CODEC.encode, CODEC.decode

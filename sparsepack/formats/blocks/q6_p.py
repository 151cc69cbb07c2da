"""Q6_P: 256 weights in 204 bytes, 6.375 bits each, as nested planes of 2 bits. Ours; no other program knows it.

    byte    0    1    2    3    4 .. 7       8 .. 11      12 .. 75   76 .. 139   140 .. 203
          +---------+---------+------------+------------+----------+-----------+------------+
          | d fp16  | c fp16  | 4 s, uint8 | 4 m, int8  | plane 1  | plane 2   | plane 3    |
          +---------+---------+------------+------------+----------+-----------+------------+

    weight = d * s[g] * T(q) / 256 + c * m[g]           g: which of the four groups of 64 weights

q has 6 bits, of which plane 1 holds the highest two, plane 2 the next and plane 3 the lowest. Bits 2 g and 2 g + 1 of
byte i of a plane are those of weight 64 g + i. A reader may stop after plane 1 or 2: level 1 knows 2 bits of q, level 2
four, level 3 all, by the same scales. T says for each level where the weights of a code lie in the mean, in quarters of
a step of the finest grid, from its middle on:

    level 1   -91  -28  28  91
    level 2   -123  -103  -87  -71  -56  -40  -24  -8  8  24  40  56  71  87  103  123
    level 3   4 q - 126

The tables of levels 1 and 2 were measured: weights within a group have a bell's shape, whose outer codes are not full.
SmolLM2-135M, Gemma 3 270M and a model of 26 million parameters agree on them to 1 part in 100.

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
HEADER, PLANE = 12, 64
MIDDLE, QUARTERS = 126, 4
SCALES, CENTRES = 255, 127
FRACTION = 1 / 256
"""Of d: weights of usual sizes then have a d that float16 holds with all its bits."""

POINTS = (
    (-91, -28, 28, 91),
    (-123, -103, -87, -71, -56, -40, -24, -8, 8, 24, 40, 56, 71, 87, 103, 123),
    tuple(QUARTERS * q - MIDDLE for q in range(64)),
)
"""T of each level, by the bits of q that it knows."""

SHARES = (0.05, 0.35, 0.6)
"""Of the squared inputs of SmolLM2-135M, those whose columns are read at each level where a token reads 3.4 bits."""

SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.78)
"""Parts of the whole range that are tried."""

HIGHEST = FP16_MAX * FRACTION * SCALES * MIDDLE
"""Weights up to this size on either side can be held."""


def at_level(numbers: Tensor, level: int) -> Tensor:
    """T of q, uint8 [...], as level 1, 2 or 3 knows it: float32 [...]."""
    points = torch.tensor(POINTS[level - 1], dtype=torch.float32, device=numbers.device)
    return points[(numbers >> 2 * (len(POINTS) - level)).long()]


def decode_level(blocks: Tensor, level: int) -> Tensor:
    """Superblocks as a reader of so many planes has them: uint8 [n, 204] -> float32 [n, 256]."""
    parts = _apart(blocks)
    d, c = fp16_from_bytes(blocks[:, :2]) * FRACTION, fp16_from_bytes(blocks[:, 2:4])
    s, m = parts.each[..., 0], parts.each[..., 1].view(torch.int8)
    points = at_level(parts.numbers, level).view(-1, GROUPS, GROUP)
    return (points.mul_((d * s)[..., None]).add_((c * m)[..., None])).view(-1, BLOCK)


def _decode(blocks: Tensor) -> Tensor:
    return decode_level(blocks, len(POINTS))


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
    planes = blocks[:, HEADER:].reshape(-1, len(POINTS), 1, PLANE)
    shifts = 2 * torch.arange(GROUPS, dtype=torch.uint8, device=blocks.device)[:, None]
    bits = planes >> shifts & 3
    numbers = bits[:, 0] << 4 | bits[:, 1] << 2 | bits[:, 2]
    each = blocks[:, 4:HEADER].view(-1, 2, GROUPS).transpose(1, 2)
    return Parts(blocks[:, :4], each, numbers.flatten(1))


def _together(parts: Parts) -> Tensor:
    q = parts.numbers.view(-1, GROUPS, GROUP)
    planes = []
    for shift in (4, 2, 0):
        bits = q >> shift & 3
        planes.append(bits[:, 0] | bits[:, 1] << 2 | bits[:, 2] << 4 | bits[:, 3] << 6)
    each = parts.each.transpose(1, 2).reshape(-1, 2 * GROUPS)
    return torch.cat([parts.shared, each, *planes], dim=1)


def _encode_given(flat: Tensor, shared: Tensor) -> Tensor:
    d, c = fp16_from_bytes(shared[:, :2]), fp16_from_bytes(shared[:, 2:])
    blocks = _encode(flat, float(flat.abs().max()), (d, c))
    blocks[:, :4] = shared
    return blocks


CODEC = BlockCodec("Q6_P", _encode, _decode, _apart, _together, 6, _encode_given, decode_level=decode_level)
encode, decode = CODEC.encode, CODEC.decode

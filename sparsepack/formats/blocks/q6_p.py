"""Q6_P: 256 weights in 200 bytes, 6.25 bits each, as nested planes. Ours; no other program knows it.

    byte    0 .. 3       4 .. 7       8 .. 71    72 .. 103   104 .. 135   136 .. 167   168 .. 199
          +------------+------------+----------+-----------+------------+------------+------------+
          | 4 s, uint8 | 4 b, uint8 | plane 1  | plane 2   | plane 3    | plane 4    | plane 5    |
          +------------+------------+----------+-----------+------------+------------+------------+

    weight = S * (T(q) + m)                             g: which of the four groups of 64 weights
    S      = 2^(s[g] // 8 - 24) * (1 + s[g] % 8 / 8 + b[g] // 64 / 32)
             the float32 of bits (s << 20) + (b >> 6 << 18) + (103 << 23)
    m      = the lower six bits of b[g] as a number from -32 to 31, times 4, plus 2: a weight of zero has a q

q has 6 bits, of which plane 1 holds the highest two and each other plane the next one. Bits 2 g and 2 g + 1 of byte i
of plane 1 are those of weight 64 g + i. Of a plane of one bit, bit 2 g of byte i is that of weight 64 g + i, and bit
2 g + 1 that of weight 64 g + 32 + i: two of them make one like plane 1 by a shift of halves.

A reader may stop after any plane: level l knows the upper l + 1 bits of q, by the same scales, and takes for T a number
in the middle of what they leave open, in quarters of a step of the finest grid:

    level 1   60 q - 90          level 3   16 q - 120         level 5   4 q - 126
    level 2   32 q - 112         level 4    8 q - 124

Level 1 has 60 in place of 64 because weights within a group have a bell's shape, whose outer codes are not full: of
SmolLM2-135M it leaves 3.6 % less squared error, and a number for each code no more than 0.5 % less again.

A scale of 10 bits by itself, a float with 5 behind the point, leaves less squared error than one of 8 bits that shares
a float16 with three others (SmolLM2-135M: 0.8 %), for an eighth of a bit a weight less. With 3 bits behind the point it
would be 3 % more, and a centre in quarters of a step gains nothing.

A grid spans a group's smallest to its largest weight, zero included, or less where the squared error, of all levels by
how large the inputs are that read them, is smaller so.
Any-Precision LLM (Park et al., 2024) reads nested codes at one precision for a whole model.
"""

from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.blocks.cpu_encoder import encode_on_cpu
from sparsepack.formats.blocks.superblock import BLOCK, BlockCodec, Parts
from sparsepack.formats.blocks.table import BLOCKS

BLOCK_BYTES = BLOCKS["Q6_P"].bytes
GROUP = 64
GROUPS = BLOCK // GROUP
HEADER, FIRST = 8, 64
MIDDLE, QUARTERS, CENTRE = 126, 4, 2
LOWEST, FRACTIONS, CODES = -24, 32, 1024
"""Scales are 2^LOWEST and up, CODES of them, FRACTIONS from one power of two to the next."""

LEVELS = BLOCKS["Q6_P"].levels
STEPS = (60, 32, 16, 8, 4)
"""T of each level's numbers, from one to the next, by the bits of q that it knows."""

SHARES = (0.005, 0.02, 0.1, 0.3, 0.575)
"""Of the squared inputs of SmolLM2-135M, those whose columns are read at each level where a token reads 3.4 bits."""

CANDIDATES = 4
"""Scales that are tried, from the lowest on whose grid spans all weights of a group down."""

HIGHEST = 1.96875 * 2.0 ** (LOWEST + 31) * MIDDLE
"""Weights up to this size on either side can be held."""


def scales(codes: Tensor) -> Tensor:
    """S of codes, which have the bits of s and below them the upper two of b: integers [...] -> float32 [...]."""
    return ((codes.int() << 18) + (127 + LOWEST << 23)).view(torch.float32)


def steps_and_centres(each: Tensor) -> tuple[Tensor, Tensor]:
    """S and m of groups: uint8 [..., 2], s and b -> float32 [...], int8 [...]."""
    s, b = each.unbind(-1)
    return scales(s.int() << 2 | b >> 6), (b << 2).view(torch.int8) + CENTRE


def at_level(numbers: Tensor, level: int) -> Tensor:
    """T of q, uint8 [...], as a level, 1 to 5, knows it: float32 [...]."""
    bits, step = LEVELS[level - 1], STEPS[level - 1]
    return (numbers >> LEVELS[-1] - bits).float().mul_(step).sub_(step * (2**bits - 1) / 2)


def decode_level(blocks: Tensor, level: int) -> Tensor:
    """Superblocks as a reader of so many planes has them: uint8 [n, 200] -> float32 [n, 256]."""
    s, m = steps_and_centres(_each(blocks))
    points = at_level(_numbers(blocks, level), level).view(-1, GROUPS, GROUP)
    return points.add_(m[..., None]).mul_(s[..., None]).view(-1, BLOCK)


def _decode(blocks: Tensor) -> Tensor:
    return decode_level(blocks, len(LEVELS))


def _encode(x: Tensor, largest: float) -> Tensor:
    """Floats [n, 256] -> uint8 [n, 200]."""
    x = x.float().view(-1, GROUPS, GROUP)
    if largest > HIGHEST:
        x = x.clamp(-HIGHEST, HIGHEST)
    each, q = fit(x)
    return _together(Parts(each[:, :0, 0], each, q.flatten(1)))


def fit(x: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The grids that lose least of weights, float32 [n, groups, 64] up to `HIGHEST`.

    shares -- what an error at each level weighs, float32 [n, levels]; None: `SHARES`

    Returns s and b, as `Parts.each` has them, uint8 [n, groups, 2], and the weights' numbers q, uint8 as x.
    """
    low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
    whole = (high / 2 - low / 2) / MIDDLE  # the scale that spans all weights
    unit = whole.clamp_min(2.0**LOWEST)
    mantissa, exponent = torch.frexp(unit)
    first = (exponent - 1 - LOWEST) * FRACTIONS + (2 * FRACTIONS * mantissa - FRACTIONS).ceil_().int()
    # In units of the whole scale, whose squares float32 holds.
    y, centre = x / unit[..., None], (high / 2 + low / 2) / unit
    weighed = (x.new_tensor([SHARES]) if shares is None else shares)[..., None, None]
    best: list[Tensor] = []
    for candidate in range(CANDIDATES):
        s = (first - candidate).clamp(0, CODES - 1)
        step = scales(s) / unit
        k = (centre * step.clamp_max(1) / step).sub_(CENTRE).div_(QUARTERS).round_().clamp_(-32, 31)
        m = k * QUARTERS + CENTRE
        q = numbers(y, step, m)
        losses = torch.zeros_like(y)
        for level, share in enumerate(weighed.unbind(1), 1):
            error = at_level(q, level).add_(m[..., None]).mul_(step[..., None]).sub_(y)
            losses += error.square_().mul_(share)
        loss = sum_halves(losses)
        found = [loss, s, k, q]
        if best:
            better = loss < best[0]
            where = [better, better, better, better[..., None]]
            found = [torch.where(*each) for each in zip(where, found, best, strict=True)]
        best = found
    _, s, k, q = best
    return torch.stack([s >> 2, (s & 3) << 6 | k.int() & 63], dim=2).to(torch.uint8), q


def sum_halves(x: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two, in halves: the order of torch.sum depends on the machine."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def numbers(x: Tensor, scale: Tensor, m: Tensor) -> Tensor:
    """The q nearest to weights x [..., groups, 64], by S and m [..., groups] of their groups: uint8 as x."""
    q = (x / scale[..., None]).sub_(m[..., None]).add_(MIDDLE).div_(QUARTERS)
    return q.round_().clamp_(0, 2 ** LEVELS[-1] - 1).to(torch.uint8)


def _apart(blocks: Tensor) -> Parts:
    return Parts(blocks[:, :0], _each(blocks), _numbers(blocks, len(LEVELS)))


def _each(blocks: Tensor) -> Tensor:
    return blocks[:, :HEADER].view(-1, 2, GROUPS).transpose(1, 2)


def _numbers(blocks: Tensor, planes: int) -> Tensor:
    """q, uint8 [n, 256], of which planes after so many first ones count as zeros."""
    shifts = 2 * torch.arange(GROUPS, dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = blocks[:, None, HEADER : HEADER + FIRST] >> shifts & 3
    read = blocks[:, HEADER + FIRST : HEADER + FIRST + (planes - 1) * FIRST // 2]
    single = read.reshape(len(blocks), planes - 1, 1, 1, FIRST // 2)
    bits = single >> shifts[..., None] + torch.arange(2, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    for plane in bits.unbind(1):
        numbers = numbers << 1 | plane.flatten(2)
    return (numbers << LEVELS[-1] - LEVELS[planes - 1]).flatten(1)


def _together(parts: Parts) -> Tensor:
    q = parts.numbers.view(-1, GROUPS, GROUP)
    each = parts.each.transpose(1, 2).reshape(-1, 2 * GROUPS)
    planes = [_bits(q >> 4, range(0, 8, 2))]
    for bit in (3, 2, 1, 0):
        planes.append(_bits((q >> bit & 1).view(-1, 2 * GROUPS, FIRST // 2), range(8)))
    return torch.cat([each, *planes], dim=1)


def _bits(numbers: Tensor, places: range) -> Tensor:
    """A plane of numbers [n, k, m], the k-th of a byte shifted to the k-th place: uint8 [n, m]."""
    plane = torch.zeros_like(numbers[:, 0])
    for of_place, place in zip(numbers.unbind(1), places, strict=True):
        plane |= of_place << place
    return plane


CODEC = BlockCodec(
    "Q6_P", _encode, _decode, _apart, _together, 6, zigzag=partial(encode_on_cpu, "Q6_P"), decode_level=decode_level
)
encode, decode = CODEC.encode, CODEC.decode

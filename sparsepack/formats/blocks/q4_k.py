"""How Q4_K's encoder chooses: the arithmetic, on superblocks that stand in columns.

Within a sub-block the weights, less their minimum, become integers y of 15 bits; sums of y
and of q y are then exact in float32 in any order, so that the bytes depend neither on chunks nor on threads. Each of a
few (levels, phase) pairs places a grid q = floor(y * levels / max(y) + phase), least squares fits scale and min to
it, and the pair with the least squared error wins. d and dmin follow from the fits; scales and mins are rounded to
six bits together, knowing the error that each rounding causes; then the nibbles, the six-bit numbers and d and dmin
are each made best once more with the others held.

Q4_K: 256 weights in 144 bytes, 4.5 bits each; the bytes that ggml and every GGUF reader know.

    byte    0  1     2  3      4 .. 15                   16 .. 143
          +--------+--------+-------------------------+--------------------------------------+
          | d fp16 | dmin   | 8 scales, 8 mins, 6 bit | 256 nibbles q                        |
          +--------+--------+-------------------------+--------------------------------------+

    weight = d * scale[j] * q  -  dmin * min[j]         j: which of the eight sub-blocks of 32 weights

    bytes  4 ..  7   low 6 bits: scale 0 .. 3     high 2 bits: high bits of scale 4 .. 7
    bytes  8 .. 11   low 6 bits: min   0 .. 3     high 2 bits: high bits of min   4 .. 7
    bytes 12 .. 15   low nibble: scale 4 .. 7, high nibble: min 4 .. 7, their low 4 bits
    byte 16 + 32 i + e   low nibble: weight e of sub-block 2 i, high nibble: weight e of sub-block 2 i + 1

`q4_k.py` says how the encoder chooses d, dmin, scales, mins and nibbles. A superblock of zeros becomes 144 zero
bytes. A CUDA device with Triton writes the CPU's bytes, many times faster than one without.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsepack.formats.blocks import q4_k_device
from sparsepack.formats.blocks.superblock import (
    BLOCK,
    FP16_MAX,
    TINY,
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

BLOCK_BYTES = BLOCKS["Q4_K"].bytes

SUB = 32
SUBS = BLOCK // SUB
STEPS = 32767  # 15 * 32 * 32767 < 2**24: sums of q y are exact

# (levels, phase), levels + phase < 16. Chosen greedily from a grid of 8ths for the least squared error summed over
# normal, uniform, Student t and positive weights; the order is that of the choice, so a prefix is good too.
GRIDS = (
    *((15.125, 0.5), (15.25, 0.125), (15.125, 0.75), (14.125, 0.5), (14.875, 0.5), (14.875, 1.0)),
    *((15.75, 0.125), (15.375, 0.5), (14.5, 1.0), (15.25, 0.0), (15.5, 0.125), (14.0, 0.75)),
)

# Where the grids are equally good (equal weights), rounding must not decide: neighbours should share one.
FIRST_BONUS = 1 + 4e-7

# The weights that the format can hold: 63 * 15 * d and -63 * dmin.
HIGHEST = FP16_MAX * 63 * 15
LOWEST = -FP16_MAX * 63


def encode_columns(x: Tensor, beyond: bool) -> Tensor:
    """Quantise superblocks that stand in columns: float32 [256, n], overwritten -> uint8 [144, n].

    For callers that checked for finite weights; `beyond` says that some may exceed what the format can hold.
    """
    y = x.view(SUBS, SUB, -1)
    if beyond:
        y.clamp_(LOWEST, HIGHEST)
    low, unit = _to_integers(y)
    q, scratch = torch.empty_like(y), torch.empty_like(y)
    total = y.sum(1)
    fit = _fit(total, _best_grid(y, total, low, q, scratch), unit, low)
    d, dmin = _shared_scales(fit)
    scale, minimum, _ = _on_grid(fit, d, dmin)

    _nibbles(y, scale * d, minimum * dmin, unit, low, q).floor_()
    fit = _fit(total, _sums(y, q, scratch), unit, low)
    scale, minimum, loss = _on_grid(fit, d, dmin, kept=(scale, minimum))
    d, dmin = _refined(fit, scale, minimum, d, dmin, loss)

    nibbles = _nibbles(y, scale * d, minimum * dmin, unit, low, q).to(torch.uint8)
    return _pack(d, dmin, scale.to(torch.uint8), minimum.to(torch.uint8), nibbles)


def encode_subs(x: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise sub-blocks that stand in columns, for given d and dmin: float32 [32, n], overwritten, and [n] each ->
    scales and mins of six bits, uint8 [n] each, and nibbles, uint8 [32, n].

    The nibbles are the best for these scales and mins, which are the best of the grids for d and dmin as they are.
    """
    y = x[None]  # superblocks of one sub-block
    low, unit = _to_integers(y)
    q, scratch = torch.empty_like(y), torch.empty_like(y)
    total = y.sum(1)
    fit = _fit(total, _best_grid(y, total, low, q, scratch), unit, low)
    scale, minimum, _ = _on_grid(fit, d, dmin)
    _nibbles(y, scale * d, minimum * dmin, unit, low, q).floor_()
    fit = _fit(total, _sums(y, q, scratch), unit, low)
    scale, minimum, _ = _on_grid(fit, d, dmin, kept=(scale, minimum))
    nibbles = _nibbles(y, scale * d, minimum * dmin, unit, low, q).to(torch.uint8)
    return scale[0].to(torch.uint8), minimum[0].to(torch.uint8), nibbles[0]


def _to_integers(y: Tensor) -> tuple[Tensor, Tensor]:
    """Make y whole numbers in place, weight = low + unit * y: [subs, 32, n] -> low and unit, [subs, n] each. low <= 0,
    because the format has no positive offset."""
    low = y.amin(1).clamp_max_(0)
    y -= low[:, None]
    unit = y.amax(1).div_(STEPS)
    y.mul_(reciprocal(unit)[:, None]).round_()
    return low, unit


def _sums(y: Tensor, q: Tensor, scratch: Tensor) -> Tensor:
    """Sums of q, q q and q y over each sub-block: [3, 8, n]. Overwrites q."""
    out = torch.empty(3, y.shape[0], y.shape[2], device=y.device)
    torch.sum(q, 1, out=out[0])
    sum_squares(q, scratch, out[1])
    torch.sum(q.mul_(y), 1, out=out[2])
    return out


def _best_grid(y: Tensor, total: Tensor, low: Tensor, q: Tensor, scratch: Tensor) -> Tensor:
    """Sums [3, 8, n] of the grid of GRIDS with the least squared error in each sub-block."""
    sums = torch.stack(
        [
            # The phase is a CPU scalar, which needs no transfer.
            _sums(y, torch.add(torch.tensor(phase), y, alpha=levels / STEPS, out=q).floor_(), scratch)
            for levels, phase in GRIDS
        ],
        dim=1,
    )
    sq, sqq, sqy = sums  # [grids, 8, n]
    # What the best scale and offset explain of the sum of squares, less the part that no grid changes.
    covariance = torch.addcmul(sqy, sq, total, value=-1 / SUB)
    slope = covariance / torch.addcmul(sqq, sq, sq, value=-1 / SUB).clamp_min_(TINY)
    # Where the min would be negative (only positive weights, or nearly so) it is held at 0.
    held = slope * sq < total
    held &= low == 0
    without_min = sqy.square().div_(sqq.clamp_min(1)).sub_(total.square().div_(SUB))
    gain = torch.where(held, without_min, slope.mul_(covariance))
    gain[0] *= FIRST_BONUS
    best = gain.argmax(0)  # [8, n]
    return sums.gather(1, best.expand(3, 1, -1, -1)).squeeze(1)


class _Fit(NamedTuple):
    """One choice of q, and y = s q - offset of least squared error over each sub-block. Each [8, n]."""

    low: Tensor  # the weight at y = 0
    y: Tensor  # sums of y = weight - low,
    q: Tensor  # of q,
    qy: Tensor  # of q y,
    qq: Tensor  # and of q q
    variance: Tensor  # of q, 32 times
    s: Tensor  # may be more than the format can hold,
    offset: Tensor  # and this less: it holds offset >= low


def _fit(total: Tensor, sums: Tensor, unit: Tensor, low: Tensor) -> _Fit:
    """From sums over integers y, [8, n], and of q, q q and q y, [3, 8, n]."""
    q, qq, qy = sums
    y, qy = total * unit, qy * unit
    variance = torch.addcmul(qq, q, q, value=-1 / SUB)
    s = torch.addcmul(qy, q, y, value=-1 / SUB).mul_(reciprocal(variance))
    offset = (s * q - y).div_(SUB)
    # Where all q are the same, scale and offset do the same thing: the min does it, or the scale if no min can.
    same = (variance <= 0) & (q > 0) & (low == 0)
    s = torch.where(same, qy / qq.clamp_min(1), s)
    return _Fit(low, y, q, qy, qq, variance, s, torch.where(same, low, offset))


def _loss(fit: _Fit, s: Tensor, offset: Tensor) -> Tensor:
    """Squared error of y = s q - offset above that of the fit, for the same q.

    As a sum of squares of differences: the expanded form loses in float32 what distinguishes two neighbouring d.
    """
    ds = s - fit.s
    mean = torch.addcmul(offset - fit.offset, ds, fit.q, value=-1 / SUB)
    return ds.square_().mul_(fit.variance).add_(mean.square_(), alpha=SUB)


def _shared_scales(fit: _Fit) -> tuple[Tensor, Tensor]:
    """d and dmin [n] for the fitted scales and mins of the sub-blocks: the best of four pairs."""
    m = fit.offset - fit.low
    without_min = torch.addcmul(fit.qy, fit.low, fit.q) / fit.qq.clamp_min(1)
    most_s = torch.where(m < 0, without_min, fit.s).amax(0).clamp_min_(0)
    most_m = m.amax(0).clamp_min_(0)
    # The larger ones leave room above the largest scale, and serve where float16 is coarse, near 2**-24.
    d, dmin = fp16(most_s / 63), fp16(most_m / 63)
    larger_d = torch.maximum(fp16(most_s / 61), next_fp16(d))
    larger_dmin = torch.maximum(fp16(most_m / 61), next_fp16(dmin))
    d = torch.stack([d, larger_d, d, larger_d])  # [4, n]
    dmin = torch.stack([dmin, dmin, larger_dmin, larger_dmin])
    _, _, loss = _on_grid(fit, d[:, None], dmin[:, None])
    best = loss.argmin(0, keepdim=True)
    return d.gather(0, best)[0], dmin.gather(0, best)[0]


def _on_grid(
    fit: _Fit, d: Tensor, dmin: Tensor, kept: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Six-bit scales and mins [..., 8, n] that suit these q best, and the loss of each superblock [..., n].

    The fitted min is rounded down and up, each time with the scale that is then best; `kept` is a third choice.
    """
    least = (fit.offset - fit.low).mul(reciprocal(dmin)).floor_().clamp_(0, 62)
    per_scale = reciprocal(fit.qq * d)
    choices = [] if kept is None else [(*kept, torch.addcmul(fit.low, kept[1], dmin))]
    for minimum in (least, least + 1):
        offset = torch.addcmul(fit.low, minimum, dmin)
        scale = torch.addcmul(fit.qy, offset, fit.q).mul_(per_scale).round_().clamp_(0, 63)
        choices.append((scale, minimum, offset))
    scale, minimum, offset = choices[0]
    loss = _loss(fit, scale * d, offset)
    for other_scale, other_minimum, offset in choices[1:]:
        other_loss = _loss(fit, other_scale * d, offset)
        better = other_loss < loss
        scale = torch.where(better, other_scale, scale)
        minimum = torch.where(better, other_minimum, minimum)
        loss = torch.where(better, other_loss, loss)
    return scale, minimum, sum_subs(loss)


def _refined(fit: _Fit, scale: Tensor, minimum: Tensor, d: Tensor, dmin: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """d and dmin [n] by least squares over the superblock with all else held; the old pair where that is no better."""
    # Without a scale, or without a min, the other is still solved for.
    a = sum_subs(scale.square() * fit.qq).clamp_min_(1)
    b = sum_subs(scale * minimum * fit.q)
    c = sum_subs(minimum.square()).mul_(SUB).clamp_min_(1)
    u = sum_subs(torch.addcmul(fit.qy, fit.low, fit.q).mul_(scale))
    v = sum_subs(torch.add(fit.y, fit.low, alpha=SUB).mul_(minimum))
    determinant = a * c - b * b
    solvable = determinant > 1e-6 * a * c
    new_d = fp16(torch.where(solvable, (u * c - v * b) / determinant, d).clamp_min_(0))
    new_dmin = fp16(torch.where(solvable, (u * b - v * a) / determinant, dmin).clamp_min_(0))
    better = sum_subs(_loss(fit, scale * new_d, torch.addcmul(fit.low, minimum, new_dmin))) < loss
    return torch.where(better, new_d, d), torch.where(better, new_dmin, dmin)


def _nibbles(y: Tensor, s: Tensor, m: Tensor, unit: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """Nearest nibbles to the weights given scales s and mins m [8, n]: [8, 32, n], plus a half, to be truncated."""
    inverse = reciprocal(s)
    offset = (m + low).mul_(inverse).add_(0.5)
    return torch.addcmul(offset[:, None], y, (unit * inverse)[:, None], out=out).clamp_(0, 15.5)


def _pack(d: Tensor, dmin: Tensor, scale: Tensor, minimum: Tensor, nibbles: Tensor) -> Tensor:
    """float32 d, dmin [n]; uint8 scale, minimum [8, n], nibbles [8, 32, n] -> uint8 [144, n]."""
    blocks = torch.empty(BLOCK_BYTES, d.shape[0], dtype=torch.uint8, device=d.device)
    # Nothing is left of a d whose scales are all zero: equal weights, equal bytes.
    blocks[0:2] = fp16_bytes(torch.where(scale.amax(0) > 0, d, 0))
    blocks[2:4] = fp16_bytes(torch.where(minimum.amax(0) > 0, dmin, 0))
    blocks[4:8] = scale[:4] | (scale[4:] >> 4 << 6)
    blocks[8:12] = minimum[:4] | (minimum[4:] >> 4 << 6)
    blocks[12:16] = (scale[4:] & 15) | (minimum[4:] << 4)
    torch.bitwise_or(nibbles[0::2], nibbles[1::2] << 4, out=blocks[16:].view(SUBS // 2, SUB, -1))
    return blocks


def scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit numbers of each superblock, one a byte: uint8 [..., 144] -> scales and mins, uint8 [..., 8] each."""
    first, second, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=-1)
    return scales, torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=-1)


def steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What a nibble counts in each sub-block, and what is taken off: uint8 [n, 144] -> float32 [n, 8] each."""
    scale, minimum = scales_and_mins(blocks)
    return fp16_from_bytes(blocks[:, 0:2]) * scale, fp16_from_bytes(blocks[:, 2:4]) * minimum


def set_scales_and_mins(blocks: Tensor, scales: Tensor, mins: Tensor) -> None:
    """Put other six-bit numbers into superblocks, the inverse of `scales_and_mins`: uint8 [n, 144], [n, 8] each."""
    blocks[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | (mins[:, 4:] << 4)


def set_nibbles(blocks: Tensor, nibbles: Tensor) -> None:
    """Put other nibbles into superblocks: uint8 [n, 144], [n, 256]."""
    pairs = nibbles.view(-1, SUBS // 2, 2, SUB)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _decode(blocks: Tensor) -> Tensor:
    s, m = steps(blocks)
    pairs = blocks[:, 16:].view(-1, SUBS // 2, 1, SUB)
    q = torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, SUBS, SUB)
    # Product and difference are rounded one after the other, as the reference does.
    return (q * s[:, :, None]).sub_(m[:, :, None]).view(-1, BLOCK)


def _encode(flat: Tensor, most: float) -> Tensor:
    return encode_columns(superblocks_first(flat), beyond=most > -LOWEST).t()


def _apart(blocks: Tensor) -> Parts:
    pairs = blocks[:, 16:].view(-1, SUBS // 2, 1, SUB)
    numbers = torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, BLOCK)
    return Parts(blocks[:, :4], torch.stack(scales_and_mins(blocks), dim=2), numbers)


def _together(parts: Parts) -> Tensor:
    blocks = torch.empty(len(parts.shared), BLOCK_BYTES, dtype=torch.uint8, device=parts.shared.device)
    blocks[:, :4] = parts.shared
    set_scales_and_mins(blocks, *parts.each.unbind(2))
    set_nibbles(blocks, parts.numbers)
    return blocks


def _encode_given(flat: Tensor, shared: Tensor) -> Tensor:
    d, dmin = shared.contiguous().view(torch.float16).float().repeat_interleave(SUBS, 0).unbind(1)
    scales, mins, nibbles = encode_subs(flat.reshape(-1, SUB).t().contiguous(), d, dmin)
    each = torch.stack([scales, mins], dim=1).view(-1, SUBS, 2)
    return _together(Parts(shared, each, nibbles.t().reshape(-1, BLOCK)))


CODEC = BlockCodec("Q4_K", _encode, _decode, _apart, _together, 4, _encode_given, q4_k_device.encode)
encode, decode = CODEC.encode, CODEC.decode

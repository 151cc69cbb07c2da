"""Gates by neuron: the numbers of a zigzag matrix laid out again, so that single neurons' gates can be read.

Zigzag shares a superblock between 256 neurons of one column: whoever wants the gates of a few neurons reads those of
all. Here the four-bit numbers q of a neuron lie side by side, for a memory from which few neurons are read; what 32 or
256 neurons share, 0.6 bits a weight as it lies here, is apart from them, for a memory that is near:

    numbers   [n, d / 2]      neuron n:      q0 low, q1 high | q2 low, q3 high | ...
    scales    [n / 32, d]     whole numbers, of 32 neurons and a column
    minima    [n / 32, d]     whole numbers
    steps     [2, n / 256, d] float16, of 256 neurons and a column: d and dmin

    weight = d * scale * q - dmin * minimum,  the same bits as the zigzag matrix decodes to

With x a product with neuron n is  sum_j q_j (d scale x)_j - sum_j (dmin minimum x)_j : the second sum, and what is in
brackets in the first, are the same for 32 neurons.

A copy of a gate in one or two bits a weight: it says who may be active, for a memory that cannot hold the gate.

                 byte 0                          byte 1
    neuron n   | w0 . w1 . w2 . w3 (low first) | w4 . w5 . w6 . w7 | ...    codes, 2 bits a weight: 0 .. 3
               | scale, float16 |

    weight = scale * (2 * code - 3)            of one bit: eight weights a byte, scale * (2 * code - 1)

It is made from the gate when a model is loaded and stored in no file. What is made from gates in 4.5 bits finds as many
of those that are active by them as what is made from the checkpoint's, four levels with one scale a row find more than
the three levels of ggml's TQ2_0 with a scale for 256 weights, and Q2_K, of 2.6 bits, few more.

A neuron with the gate w and the copy v is listed for the input x where v . x > -limit |x|. The error of v . x is of the
size |v - w| |x| / sqrt(d), and a limit is a number of such errors, the same for all neurons of a block; see `limits`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.blocks.q4_k import SUB, SUBS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS


@dataclass(frozen=True)
class GateRows:
    """A gate by neuron.

    numbers        -- uint8 [n, d / 2]
    scales, minima -- uint8 [n / 32, d], rounded up
    steps          -- float16 [2, n / 256, d], rounded up
    """

    numbers: Tensor
    scales: Tensor
    minima: Tensor
    steps: Tensor

    def decoded(self) -> Tensor:
        """The gate: float32 [n, d], bit for bit what the zigzag matrix decodes to."""
        rows = len(self.numbers)
        q = torch.stack([self.numbers & 15, self.numbers >> 4], dim=2).flatten(1)
        d, dmin = (_each(step.float(), BAND_ROWS // SUB)[: len(self.scales)] for step in self.steps)
        scale, minimum = (_each(part, SUB)[:rows] for part in (d * self.scales, dmin * self.minima))
        return q * scale - minimum


def by_neuron(gate: PackedMatrix) -> GateRows:
    """Lay out a zigzag gate [n, d], d even, by neuron. Raises `PackingError` for any other matrix."""
    if gate.format != MatrixFormat("Q4_K", "zigzag") or gate.columns % 2:
        raise PackingError(
            f"gate of type {gate.format} with {gate.columns} columns: expected zigzag-q4_k, an even number"
        )
    gate = gate.padded()
    bands, columns, _ = gate.blocks.shape
    pairs = gate.blocks[..., 16:].reshape(bands, columns, SUBS // 2, 1, SUB)
    q = torch.cat([pairs & 15, pairs >> 4], dim=3).view(bands, columns, BAND_ROWS)
    q = q.transpose(1, 2).reshape(-1, columns)[: gate.rows]
    groups = -(-gate.rows // SUB)
    scales, minima = (
        part.transpose(1, 2).reshape(-1, columns)[:groups].contiguous() for part in q4_k.scales_and_mins(gate.blocks)
    )
    steps = gate.blocks[..., :4].contiguous().view(torch.float16).permute(2, 0, 1).contiguous()
    return GateRows(q[:, 0::2] | q[:, 1::2] << 4, scales, minima, steps)


def _each(rows: Tensor, times: int) -> Tensor:
    return rows.repeat_interleave(times, dim=0)


BITS = (1, 2)
_ROUNDS = 8  # of scales and codes in turns; later ones change the error by less than a thousandth of itself
_RAREST = 1e-6  # neurons that were never active, or always, count as this far from it


@dataclass(frozen=True)
class GateCopy:
    """The gate in `bits` a weight: an odd number from -(2^bits - 1) to 2^bits - 1, times the scale of its row.

    codes  -- uint8 [n, d * bits / 8], the first weight in the lowest bits, (number + 2^bits - 1) / 2
    scales -- float16 [n]
    """

    codes: Tensor
    scales: Tensor
    bits: int

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.codes.nbytes + self.scales.nbytes

    def decoded(self) -> Tensor:
        """What the codes mean: float32 [n, d]."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=self.codes.device)
        levels = 2**self.bits - 1
        numbers = 2 * (self.codes[..., None] >> shifts & levels).flatten(1).float() - levels
        return torch.mul(numbers, self.scales.float()[:, None])


def copy_bytes(neurons: int, hidden: int, bits: int = 2) -> int:
    """What the copy of a gate takes, with limits in float32."""
    return neurons * (hidden * bits // 8 + 2 + 4)


def copied(gate: Tensor, bits: int = 2) -> GateCopy:
    """A gate [n, d], d a multiple of 8, in `bits` a weight, 1 or 2.

    Codes and the scale of a row are chosen in turns, by least squares: of one bit, the mean magnitude of the row.
    Raises `PackingError` for a width or a number of bits that does not fit.
    """
    if gate.dim() != 2 or gate.shape[1] % 8 or bits not in BITS:
        raise PackingError(f"gate {list(gate.shape)}, {bits} bits: expected [n, d], d a multiple of 8, and 1 or 2 bits")
    weight, levels = gate.float(), 2**bits - 1
    scales = 2 * weight.abs().mean(1, keepdim=True) / (levels + 1)
    for _ in range(_ROUNDS):
        numbers = 2 * _codes(weight, scales, levels) - levels
        scales = (weight * numbers).sum(1, keepdim=True) / numbers.square().sum(1, keepdim=True)
    scales = scales.half()
    codes = _codes(weight, scales.float(), levels).to(torch.uint8).view(len(gate), -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=weight.device)
    return GateCopy((codes << shifts).sum(-1, dtype=torch.uint8), scales[:, 0], bits)


def _codes(weight: Tensor, scales: Tensor, levels: int) -> Tensor:
    # Of a row of zeros every code means zero.
    return ((weight / scales.clamp(min=torch.finfo(torch.float32).tiny) + levels) / 2).round().clamp(0, levels)


@dataclass(frozen=True)
class CopyErrors:
    """How far a copy is from its gate: the norms of each row's difference and of the row, float32 [n] each."""

    error: Tensor
    norm: Tensor


def errors_of(copy: GateCopy, gate: Tensor) -> CopyErrors:
    """How far a copy is from the gate [n, d] that was copied. Raises `PackingError` for another shape."""
    if gate.shape != copy.decoded().shape:
        raise PackingError(f"gate {list(gate.shape)}: expected those of the copy, {list(copy.decoded().shape)}")
    gate = gate.float()
    return CopyErrors((copy.decoded() - gate).norm(dim=1), gate.norm(dim=1))


def limits(copy: GateCopy, gate: Tensor, frequency: Tensor, times: float) -> Tensor:
    """`limits_of` a whole copy of the gate [n, d]. Raises `PackingError` for shapes that do not fit together, too."""
    return limits_of(errors_of(copy, gate), gate.shape[1], frequency, times)


def limits_of(errors: CopyErrors, width: int, frequency: Tensor, times: float) -> Tensor:
    """Below which a neuron is not listed, so that about `times` as many are listed as are active: float32 [n].

    width     -- of a row of the gate, d
    frequency -- [n], the share of a text's tokens at which each neuron was active

    No text is needed, nor scores on one. Gates are taken as normally distributed over tokens: one that is above zero
    with the frequency f has its mean at icdf(f) of its deviations, |w| in units of |x| / sqrt(d), and the copy adds an
    error with a deviation of |v - w|. A neuron is listed above -z such errors, and z is what makes the expected number
    of listed ones `times` that of active ones; where that is all neurons, limits are infinite. On books-26m-relu 1.5
    asked for lists 1.41 times as many as are active.

    Raises `PackingError` for shapes that do not fit together, or `times` below 1.
    """
    error, norm = errors.error, errors.norm
    if frequency.shape != error.shape:
        raise PackingError(f"frequencies {list(frequency.shape)}: expected those of the copy's {len(error)} neurons")
    if not times >= 1:
        raise PackingError(f"{times:g} times as many as are active: expected at least 1, or active ones are lost")
    relative = torch.where(error > 0, error / norm, 0).double()
    often = frequency.to(error.device).double()
    mean = torch.special.ndtri(often.clamp(_RAREST, 1 - _RAREST))
    wanted = times * float(often.sum())

    def expected(z: float) -> float:
        return float(torch.special.ndtr((mean + z * relative) / (1 + relative.square()).sqrt()).sum())

    low, high = -64.0, 64.0
    if wanted >= len(error) or expected(high) < wanted:
        return torch.full_like(error, torch.inf)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < wanted else (low, middle)
    return torch.mul(error, high / math.sqrt(width))

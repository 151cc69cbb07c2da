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
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.codecs import q4_k
from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.formats.codecs.q4_k_fit import SUB, SUBS
from sparsepack.formats.codecs.zigzag import BAND_ROWS


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
    if gate.type != ZIGZAG or gate.columns % 2:
        raise PackingError(f"gate of type {gate.type} with {gate.columns} columns: expected {ZIGZAG}, an even number")
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

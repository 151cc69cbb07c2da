"""Matrices that every token reads and that lie in the host's memory: who multiplies which bands of them.

    GPU        asks | first bands, over the bus          | takes the answer: rows of both
    processor       | last bands, from memory of its own |

So both paths to the host's memory are at work, as for neurons without slots. The bands are divided once, by the
measured links, when a model is loaded: the same text then has the same bits. Where attention has thresholds, by which
the GPU skips columns, its matrices stay whole, and so do gates by rows and what has one band.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.formats.codecs.zigzag import BAND_ROWS
from sparsepack.formats.mlp_kinds import MLP_GATE
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.links import Links, over_the_bus
from sparsepack.runtime.hybrid.handover import AskedProduct


@dataclass(frozen=True)
class FarMatrix:
    """A matrix whose bands are divided.

    block, name -- where it stands
    near        -- the GPU multiplies so many first bands
    """

    block: int
    name: str
    matrix: PackedMatrix
    near: int

    @property
    def asked(self) -> AskedProduct:
        """What the GPU asks the processor for."""
        return AskedProduct(self.block, self.matrix.columns, self.matrix.rows - BAND_ROWS * self.near)

    @property
    def beside(self) -> PackedMatrix:
        """The bands of the processor."""
        rest, m = self.matrix.blocks[self.near :], self.matrix
        return PackedMatrix(rest.contiguous(), m.type, self.asked.rows, m.columns)


def far_matrices(packed: PackedModel, plan: Plan, links: Links) -> list[FarMatrix]:
    """The matrices of a model by neurons that are divided, in the order in which a step comes to them."""
    found = []
    divides = all(site.rule is None for layer in packed.layers for site in layer.attention.values())
    for block, layer in enumerate(packed.layers):
        matrices: list[tuple[str, PackedMatrix]] = []
        if block >= plan.attention and divides:
            matrices += [(name, layer.attention[name].matrix) for name in ATTENTION_SITES]
        if block >= plan.gates and isinstance(layer.mlp, NeuronMlp) and layer.mlp.gate.type == ZIGZAG:
            matrices.append((MLP_GATE, layer.mlp.gate))
        for name, matrix in matrices:
            near = _near_bands(matrix, plan.parts.record, links)
            if near < len(matrix.blocks):
                found.append(FarMatrix(block, name, matrix, near))
    return found


def bytes_beside(far: Sequence[FarMatrix]) -> int:
    """Bytes that the processor reads of them for a token."""
    return sum(each.matrix.blocks[each.near :].nbytes for each in far)


def _near_bands(matrix: PackedMatrix, record: int, links: Links) -> int:
    """How many first bands the GPU multiplies, so that both sides end together: one at least."""
    bands, speeds = len(matrix.blocks), links.far(record)
    of_a_band = matrix.blocks[0].nbytes
    bus, worker = (speed / of_a_band for speed in speeds)
    return max(1, over_the_bus(0, bands, Links(1.0, bus, worker, links.handover)))

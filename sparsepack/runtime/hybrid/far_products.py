"""Matrices that every token reads and that lie in the host's memory: who multiplies which bands of them.

    GPU        asks | first bands, over the bus          | takes the answer: rows of both
    processor       | last bands, from memory of its own |

So both paths to the host's memory are at work, as for neurons without slots. The bands are divided once, by the
measured links and in tiles of several, when a model is loaded: the same text then has the same bits. Both sides leave
out the columns that a site's thresholds say are inactive. Gates by rows stay whole, and so does what has one tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.formats.codecs.zigzag import BAND_ROWS
from sparsepack.formats.mlp_kinds import MLP_GATE
from sparsepack.formats.packed import DenseMlp, NeuronMlp, PackedModel
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.links import Links, over_the_bus
from sparsepack.runtime.cuda.products.tile_config import far_tile_bands
from sparsepack.runtime.hybrid.handover import AskedProduct


@dataclass(frozen=True)
class FarMatrix:
    """A matrix whose bands are divided.

    block, name -- where it stands
    matrix      -- of bands alone
    near        -- the GPU multiplies so many first bands, a multiple of `tile_bands`
    skips       -- whether thresholds say which columns are active
    """

    block: int
    name: str
    matrix: PackedMatrix
    near: int
    skips: bool = False

    @property
    def tile_bands(self) -> int:
        """The GPU multiplies whole tiles of so many bands."""
        return far_tile_bands(len(self.matrix.blocks))

    @property
    def asked(self) -> AskedProduct:
        """What the GPU asks the processor for."""
        return AskedProduct(self.block, self.matrix.columns, self.matrix.rows - BAND_ROWS * self.near, self.skips)

    @property
    def beside(self) -> PackedMatrix:
        """The bands of the processor."""
        rest, m = self.matrix.blocks[self.near :], self.matrix
        row_scale = None if m.row_scale is None else m.row_scale[BAND_ROWS * self.near :]
        return PackedMatrix(rest.contiguous(), m.type, self.asked.rows, m.columns, row_scale=row_scale)


def far_matrices(packed: PackedModel, plan: Plan, links: Links) -> list[FarMatrix]:
    """The matrices of a model that are divided, in the order in which a step comes to them."""
    found = []
    first_far = {**dict.fromkeys(ATTENTION_SITES, plan.attention), "mlp_in": plan.gates, "mlp_mid": plan.downs}
    for block, layer in enumerate(packed.layers):
        mlp = layer.mlp
        sites = {**layer.attention, **mlp.sites} if isinstance(mlp, DenseMlp) else layer.attention
        matrices = {
            name: (sites[name].matrix, sites[name].rule is not None)
            for name, first in first_far.items()
            if name in sites and block >= first
        }
        if isinstance(mlp, NeuronMlp) and block >= plan.gates and mlp.gate.type == ZIGZAG:
            matrices[MLP_GATE] = mlp.gate, False
        for name, (stored, skips) in matrices.items():
            matrix = stored.padded()
            near = _near_bands(matrix, plan.parts.record, links)
            if near < len(matrix.blocks):
                found.append(FarMatrix(block, name, matrix, near, skips))
    return found


def bytes_beside(far: Sequence[FarMatrix]) -> int:
    """Bytes that the processor reads of them for a token."""
    return sum(each.matrix.blocks[each.near :].nbytes for each in far)


def _near_bands(matrix: PackedMatrix, record: int, links: Links) -> int:
    """How many first bands the GPU multiplies, so that both sides end together: a tile of them at least."""
    bands, speeds = len(matrix.blocks), links.far(record)
    tile_bands = far_tile_bands(bands)
    of_a_tile = tile_bands * matrix.blocks[0].nbytes
    bus, worker = (speed / of_a_tile for speed in speeds)
    return tile_bands * max(1, over_the_bus(0, bands // tile_bands, Links(1.0, bus, worker, links.handover)))

"""Matrices that every token reads and that lie in the host's memory: who multiplies which bands of them.

    GPU        asks | first bands, over the bus          | takes the answer: rows of both
    processor       | last bands, from memory of its own |

So both paths to the host's memory are at work, as for neurons without slots. The bands are divided once, by the
measured links and in tiles of several, when a model is loaded: the same text then has the same bits. Both sides leave
out the columns that a site's thresholds say are inactive. Gates by rows stay whole, and so does what has one tile.

Sites of a model whose products the GPU shares with the processor (`far_products.py`), loaded: what lies where in the
memory that both reach, and what of a matrix the GPU reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import DenseMlp, NeuronMlp, PackedModel, PackedSite
from sparsepack.formats.table import MLP_GATE
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile, over_the_bus
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_sites, loaded_site
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.far import FarProduct
from sparsepack.runtime.cuda.products.tile_config import far_tile_bands, far_tile_config
from sparsepack.runtime.hybrid.handover import AskedProduct, HandOver

WAIT_MILLISECONDS = 10_000
"""The GPU waits no longer for an answer, which takes less than a millisecond."""


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
        return PackedMatrix(rest.contiguous(), m.format, self.asked.rows, m.columns, row_scale=row_scale)


def part(there: Tensor, begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """A part of memory, uint8, that begins at a byte."""
    size = dtype.itemsize * torch.Size(shape).numel()
    return there[begin : begin + size].view(dtype).view(shape)


class FarSites:
    """The sites that a GPU shares with the processor.

    far       -- their matrices, which the layout's products are of
    there     -- the memory of the hand-over as the GPU sees it
    number    -- int32 [2]: of the step, as `neurons.Division` has it
    waited    -- int64 [1], to which the nanoseconds are added that the GPU waited
    has_lists -- whether the first block's list gives a step its number; else that is what ends the step
    """

    def __init__(
        self,
        far: Sequence[FarMatrix],
        layout: HandOver,
        there: Tensor,
        number: Tensor,
        waited: Tensor,
        device: torch.device,
        kernels: Kernels,
        has_lists: bool,
    ) -> None:
        self._kernels, self._device, self._layout, self._there = kernels, device, layout, there
        self._number, self._waited, self._has_lists = number, waited, has_lists
        self._places = {(of.block, of.name): (of, at) for of, at in zip(far, layout.places, strict=True)}
        rows = max((BAND_ROWS * each.near for each in far), default=0)
        self._sums = torch.zeros(layout.sequences * rows, device=device)

    def load(self, block: int, sites: Mapping[str, PackedSite], places: Mapping[str, Place]) -> dict[str, CudaSite]:
        """The sites of a block, by name: those that are shared, and the others where they shall lie."""
        found = {}
        gated = "mlp_mid" not in sites or sites["mlp_in"].matrix.rows > sites["mlp_mid"].matrix.columns
        for name, site in sites.items():
            if (block, name) in self._places:
                found[name] = self._shared(block, name, site)
            else:
                found |= load_sites({name: site}, self._device, self._kernels, places[name], gated)
        return found

    def _shared(self, block: int, name: str, site: PackedSite) -> CudaSite:
        kernels, device, (of, at) = self._kernels, self._device, self._places[block, name]
        texts, asked = self._layout.sequences, of.asked
        config = far_tile_config(len(of.matrix.blocks), asked.columns, device, of.tile_bands)
        load = partial(kernels.load_zigzag, of.matrix, device, config, place=kernels.in_host_memory)
        loaded = loaded_site(site, device, kernels, load)
        near = kernels.first_bands(loaded.matrix, of.near)
        there = partial(part, self._there)
        product = FarProduct(
            near=near,
            rows=loaded.matrix.rows,
            sums=self._sums[: texts * near.rows].view(texts, near.rows),
            number=self._number,
            before_list=of.block == 0 or not self._has_lists,
            abort=there(self._layout.abort, torch.int32, 1),
            request_number=there(at.request, torch.int32, 1),
            request_x=there(at.x, torch.float32, texts, asked.columns),
            answer_number=there(at.answer, torch.int32, 1),
            answer=there(at.y, torch.float32, texts, asked.rows),
            waited=self._waited,
            limit=WAIT_MILLISECONDS,
        )
        return CudaSite(loaded.matrix, loaded.dense, loaded.sparse, product)


def far_matrices(packed: PackedModel, plan: Plan, links: BandwidthProfile) -> list[FarMatrix]:
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
        if isinstance(mlp, NeuronMlp) and block >= plan.gates and mlp.gate.format.order == "zigzag":
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


def _near_bands(matrix: PackedMatrix, record: int, links: BandwidthProfile) -> int:
    """How many first bands the GPU multiplies, so that both sides end together: a tile of them at least."""
    bands, speeds = len(matrix.blocks), links.far(record)
    tile_bands = far_tile_bands(bands)
    of_a_tile = tile_bands * matrix.blocks[0].nbytes
    bus, worker = (speed / of_a_tile for speed in speeds)
    return tile_bands * max(1, over_the_bus(0, bands // tile_bands, BandwidthProfile(1.0, bus, worker, links.handover)))

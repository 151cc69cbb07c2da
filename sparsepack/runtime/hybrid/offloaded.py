"""Matrices that every token reads and that lie in the host's memory: who multiplies which bands of them.

    GPU        asks | first bands, over the bus          | takes the answer: rows of both
    processor       | last bands, from memory of its own |

So both paths to the host's memory are at work, as for neurons without slots. The bands are divided once, by the
measured bandwidth profile and in tiles of several, when a model is loaded: the same sequence then has the same bits.
Both sides leave out the columns that a site's thresholds say are inactive. Gates by rows stay whole, and so does what
has one tile.

Of a matrix of planes, whose first ones lie on the card, what is divided are the others: the GPU multiplies the first
planes of all bands, and the others of the first bands, and the sums of both sides are added.

    GPU        asks | first planes of all bands; others of the first bands, over the bus | adds the answer
    processor       | other planes of the last bands                                     |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import DenseMlp, NeuronMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile, over_the_bus
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_site, load_sites
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import DividedPlace, Place
from sparsepack.runtime.cuda.products.offloaded import OffloadedProduct
from sparsepack.runtime.cuda.products.tile_config import (
    COLUMNS_AT_ONCE,
    offloaded_tile_bands,
    offloaded_tile_config,
    planes_tile_bands,
)
from sparsepack.runtime.hybrid.mailbox import Mailbox, ProductRequest

PLANES_BY_WORKER = 0.45
"""The processor multiplies planes at this share of the speed, in bytes, of whole columns."""
PLANES_READ = 0.4
"""Of what lies in the host's memory of a matrix of planes with thresholds, about this share is read."""
_HEADER, _PLANE = 8, 32  # bytes of a superblock: its scales, and a plane after the first

WAIT_MILLISECONDS = 10_000
"""The GPU waits no longer for an answer, which takes less than a millisecond."""


SPAN_ROWS = 1024
"""The processor multiplies planes of so many rows together (`ProductRequest.begins`)."""

SITES = (*ATTENTION_SITES, "mlp_in", "mlp_mid")


@dataclass(frozen=True)
class OffloadedMatrix:
    """A matrix whose bands are divided.

    block, name -- where it stands
    matrix      -- of bands alone
    gpu_bands   -- the GPU multiplies so many first bands, a multiple of `tile_bands`
    skips       -- whether thresholds say which columns are active
    first       -- of planes, so many first ones are multiplied by the GPU in all bands; 0: the matrix has none
    gpu_columns -- then of the next tile the GPU multiplies so many first columns
    """

    block: int
    name: str
    matrix: PackedMatrix
    gpu_bands: int
    skips: bool = False
    first: int = 0
    gpu_columns: int = 0

    @property
    def tile_bands(self) -> int:
        """The GPU multiplies whole tiles of so many bands."""
        bands = len(self.matrix.blocks)
        return planes_tile_bands(bands) if self.first else offloaded_tile_bands(bands)

    @property
    def request(self) -> ProductRequest:
        """What the GPU asks the processor for."""
        return ProductRequest(
            self.block,
            self.matrix.columns,
            self.matrix.rows - BAND_ROWS * self.gpu_bands,
            skips=self.skips and not self.first,
            levels=self.first > 0,
            begins=self.gpu_columns,
        )

    @property
    def cpu_part(self) -> PackedMatrix:
        """The bands of the processor."""
        rest, m = self.matrix.blocks[self.gpu_bands :], self.matrix
        row_scale = None if m.row_scale is None else m.row_scale[BAND_ROWS * self.gpu_bands :]
        return PackedMatrix(rest.contiguous(), m.format, self.request.rows, m.columns, row_scale=row_scale)


class GpuMailbox:
    """A mailbox in memory that GPU and processor reach, and what the steps of a GPU count.

    layout  -- where in it everything lies
    memory  -- as the processor sees it
    number  -- int32 [2]: of the step, as `neurons.Division` has it
    traffic -- int64 [5], likewise
    """

    def __init__(self, layout: Mailbox, device: torch.device, kernels: Kernels) -> None:
        self.layout = layout
        self.memory, self._there = kernels.shared_memory(layout.size, device, "the mailbox")
        self.number = torch.zeros(2, dtype=torch.int32, device=device)
        self.traffic = torch.zeros(5, dtype=torch.int64, device=device)

    def part(self, begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """A part of it that begins at a byte, as the GPU sees it."""
        size = dtype.itemsize * torch.Size(shape).numel()
        return self._there[begin : begin + size].view(dtype).view(shape)


class OffloadedSites:
    """The sites of a model, of which the GPU shares some with the processor.

    offloaded -- their matrices, of which the mailbox has the products
    has_lists -- whether the first block's list gives a step its number; else that is what ends the step

    rest_read -- int64 [blocks, sites]: of matrices of planes, the bytes of a row of superblocks that steps read beyond
                 the planes on the card; `SITES` in their order
    """

    def __init__(
        self,
        offloaded: Sequence[OffloadedMatrix],
        mailbox: GpuMailbox,
        device: torch.device,
        kernels: Kernels,
        has_lists: bool,
    ) -> None:
        self._kernels, self._device, self._mailbox, self._has_lists = kernels, device, mailbox, has_lists
        layout = mailbox.layout
        self._places = {(of.block, of.name): (of, at) for of, at in zip(offloaded, layout.places, strict=True)}
        rows = max((each.matrix.rows if each.first else BAND_ROWS * each.gpu_bands for each in offloaded), default=0)
        self._sums = torch.zeros(layout.sequences * rows, device=device)
        columns = max((each.matrix.columns for each in offloaded if each.first), default=0)
        self._x = torch.zeros(layout.sequences * columns, device=device)
        self.rest_read = torch.zeros(layout.blocks, len(SITES), dtype=torch.int64, device=device)

    def load(self, block: int, sites: Mapping[str, PackedSite], places: Mapping[str, Place]) -> dict[str, CudaSite]:
        """The sites of a block, by name: those that are shared, and the others where they shall lie."""
        found = {}
        gated = "mlp_mid" not in sites or sites["mlp_in"].matrix.rows > sites["mlp_mid"].matrix.columns
        for name, site in sites.items():
            if (block, name) in self._places:
                found[name] = self._shared(block, name, site, places[name])
            else:
                found |= load_sites({name: site}, self._device, self._kernels, places[name], gated)
                if isinstance(places[name], DividedPlace):
                    matrix = self._kernels.counting_rest(found[name].matrix, self._counter(block, name))
                    found[name] = replace(found[name], matrix=matrix)
        return found

    def _counter(self, block: int, name: str) -> Tensor:
        at = SITES.index(name)
        return self.rest_read[block, at : at + 1]

    def _shared(self, block: int, name: str, site: PackedSite, place: Place) -> CudaSite:
        kernels, device, (of, at) = self._kernels, self._device, self._places[block, name]
        mailbox, request = self._mailbox, of.request
        sequences, columns = mailbox.layout.sequences, request.columns
        config = None if of.first else offloaded_tile_config(len(of.matrix.blocks), columns, device, of.tile_bands)
        there = place if of.first else kernels.in_host_memory
        loaded = load_site(site, device, kernels, partial(kernels.load_zigzag, of.matrix, device, config, place=there))
        if of.first:
            counting = kernels.counting_rest(loaded.matrix, self._counter(block, name))
            gpu_part = kernels.rest_of_first_bands(counting, of.gpu_bands, of.gpu_columns)
        else:
            gpu_part = kernels.first_bands(loaded.matrix, of.gpu_bands)
        product = OffloadedProduct(
            gpu_part=gpu_part,
            rows=loaded.matrix.rows,
            sums=self._sums[: sequences * gpu_part.rows].view(sequences, gpu_part.rows),
            number=mailbox.number,
            before_list=of.block == 0 or not self._has_lists,
            abort=mailbox.part(mailbox.layout.abort, torch.int32, 1),
            request_number=mailbox.part(at.request, torch.int32, 1),
            request_x=mailbox.part(at.x, torch.float32, sequences, request.columns),
            answer_number=mailbox.part(at.answer, torch.int32, 1),
            answer=mailbox.part(at.y, torch.float32, sequences, request.rows),
            waited=mailbox.traffic[4:],
            limit=WAIT_MILLISECONDS,
            levels=mailbox.part(at.levels, torch.uint8, columns) if of.first else None,
            x=self._x[: sequences * columns].view(sequences, columns) if of.first else None,
        )
        return CudaSite(loaded.matrix, loaded.dense, loaded.sparse, product)


def offloaded_matrices(packed: PackedModel, plan: Plan, bandwidth: BandwidthProfile) -> list[OffloadedMatrix]:
    """The matrices of a model that are divided, in the order in which a step comes to them."""
    found = []
    first_offloaded = {**dict.fromkeys(ATTENTION_SITES, plan.attention), "mlp_in": plan.gates, "mlp_mid": plan.downs}
    if len(plan.parts.levels) > 1:
        return _divided_planes(packed, plan, bandwidth)
    for block, layer in enumerate(packed.layers):
        mlp, sites = layer.mlp, sites_of(layer)
        matrices = {
            name: (sites[name].matrix, sites[name].rule is not None)
            for name, first in first_offloaded.items()
            if name in sites and block >= first
        }
        if isinstance(mlp, NeuronMlp) and block >= plan.gates and mlp.gate.format.order == "zigzag":
            matrices[MLP_GATE] = mlp.gate, False
        for name, (stored, skips) in matrices.items():
            matrix = stored.padded()
            gpu_bands = _gpu_bands(matrix, plan.parts.record, bandwidth)
            if gpu_bands < len(matrix.blocks):
                found.append(OffloadedMatrix(block, name, matrix, gpu_bands, skips))
    return found


def _divided_planes(packed: PackedModel, plan: Plan, bandwidth: BandwidthProfile) -> list[OffloadedMatrix]:
    """Likewise of a model of planes."""
    found, whole = [], len(plan.parts.levels)
    for block, layer in enumerate(packed.layers):
        for name, site in sites_of(layer).items():
            on_card = plan.on_card(kind_of(name), block)
            if on_card == whole:
                continue
            matrix, skips = site.matrix.padded(), site.rule is not None
            speeds = bandwidth.offloaded_speeds(plan.parts.record)
            share = _gpu_share_of_planes(matrix, on_card, skips, speeds, bandwidth.handover)
            bands, columns = _tiles_of_share(matrix, share)
            if bands < len(matrix.blocks):
                found.append(OffloadedMatrix(block, name, matrix, bands, skips, max(on_card, 1), columns))
    return found


def sites_of(layer: PackedLayer) -> dict[str, PackedSite]:
    """The sites of a block, but those of experts."""
    return {**layer.attention, **(layer.mlp.sites if isinstance(layer.mlp, DenseMlp) else {})}


def kind_of(site: str) -> str:
    """What a plan calls the matrices of a site."""
    return {"mlp_in": "gates", "mlp_mid": "records"}.get(site, "attention")


def _gpu_share_of_planes(
    matrix: PackedMatrix, on_card: int, skips: bool, speeds: tuple[float, float], handover: float
) -> float:
    """Of which share of the rows the GPU reads over the bus the planes that are not on the card, so that both sides end
    together; all of them where that is sooner. Where no plane is on the card, it reads the first one of all rows."""
    superblocks = matrix.columns * len(matrix.blocks)
    planes = len(matrix.levels) - max(on_card, 1)
    of_bus = (PLANES_READ if skips else 1.0) * superblocks * _PLANE * planes
    bus, worker = of_bus / speeds[0], (of_bus + superblocks * _HEADER) / (PLANES_BY_WORKER * speeds[1])
    before = 0.0 if on_card else superblocks * matrix.levels[0] / speeds[0]
    share = min(max((handover + worker - before) / (bus + worker), 0.0), 1.0)
    together = max(before + share * bus, handover + (1 - share) * worker)
    return share if together < before + bus else 1.0


def _tiles_of_share(matrix: PackedMatrix, share: float) -> tuple[int, int]:
    """The bands of whole tiles in a share of the rows, and of the next tile, where it is as high as a span of the
    processor's, the first columns."""
    bands = len(matrix.blocks)
    tile_bands = planes_tile_bands(bands)
    tiles = share * -(-bands // tile_bands)
    if BAND_ROWS * tile_bands != SPAN_ROWS:
        return min(bands, tile_bands * round(tiles)), 0
    columns = round((tiles - int(tiles)) * matrix.columns) // COLUMNS_AT_ONCE * COLUMNS_AT_ONCE
    return min(bands, tile_bands * int(tiles)), columns


def cpu_bytes(offloaded: Sequence[OffloadedMatrix]) -> int:
    """Bytes that the processor reads of them for a token."""
    return sum(each.matrix.blocks[each.gpu_bands :].nbytes for each in offloaded)


def _gpu_bands(matrix: PackedMatrix, record: int, bandwidth: BandwidthProfile) -> int:
    """How many first bands the GPU multiplies, so that both sides end together: a tile of them at least."""
    bands, speeds = len(matrix.blocks), bandwidth.offloaded_speeds(record)
    tile_bands = offloaded_tile_bands(bands)
    of_a_tile = tile_bands * matrix.blocks[0].nbytes
    bus, worker = (speed / of_a_tile for speed in speeds)
    return tile_bands * max(
        1, over_the_bus(0, bands // tile_bands, BandwidthProfile(1.0, bus, worker, bandwidth.handover))
    )

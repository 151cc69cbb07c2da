"""Matrices that every token reads and that lie in the host's memory: who multiplies which bands of them.

    GPU        asks | first bands, over the bus          | takes the answer: rows of both
    processor       | last bands, from memory of its own |

So both paths to the host's memory are at work, as for neurons without slots. The bands are divided once, by the
measured bandwidth profile and in tiles of several, when a model is loaded: the same sequence then has the same bits.
Both sides leave out the columns that a site's thresholds say are inactive. Gates by rows stay whole, and so does what
has one tile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import DenseMlp, NeuronMlp, PackedModel, PackedSite
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile, over_the_bus
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_site, load_sites
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.cuda.products.offloaded import OffloadedProduct
from sparsepack.runtime.cuda.products.tile_config import offloaded_tile_bands, offloaded_tile_config
from sparsepack.runtime.hybrid.mailbox import Mailbox, ProductRequest

WAIT_MILLISECONDS = 10_000
"""The GPU waits no longer for an answer, which takes less than a millisecond."""


@dataclass(frozen=True)
class OffloadedMatrix:
    """A matrix whose bands are divided.

    block, name -- where it stands
    matrix      -- of bands alone
    gpu_bands   -- the GPU multiplies so many first bands, a multiple of `tile_bands`
    skips       -- whether thresholds say which columns are active
    """

    block: int
    name: str
    matrix: PackedMatrix
    gpu_bands: int
    skips: bool = False

    @property
    def tile_bands(self) -> int:
        """The GPU multiplies whole tiles of so many bands."""
        return offloaded_tile_bands(len(self.matrix.blocks))

    @property
    def request(self) -> ProductRequest:
        """What the GPU asks the processor for."""
        return ProductRequest(
            self.block, self.matrix.columns, self.matrix.rows - BAND_ROWS * self.gpu_bands, self.skips
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
        rows = max((BAND_ROWS * each.gpu_bands for each in offloaded), default=0)
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
        mailbox, request = self._mailbox, of.request
        sequences = mailbox.layout.sequences
        config = offloaded_tile_config(len(of.matrix.blocks), request.columns, device, of.tile_bands)
        load = partial(kernels.load_zigzag, of.matrix, device, config, place=kernels.in_host_memory)
        loaded = load_site(site, device, kernels, load)
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
        )
        return CudaSite(loaded.matrix, loaded.dense, loaded.sparse, product)


def offloaded_matrices(packed: PackedModel, plan: Plan, bandwidth: BandwidthProfile) -> list[OffloadedMatrix]:
    """The matrices of a model that are divided, in the order in which a step comes to them."""
    found = []
    first_offloaded = {**dict.fromkeys(ATTENTION_SITES, plan.attention), "mlp_in": plan.gates, "mlp_mid": plan.downs}
    for block, layer in enumerate(packed.layers):
        mlp = layer.mlp
        sites = {**layer.attention, **mlp.sites} if isinstance(mlp, DenseMlp) else layer.attention
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

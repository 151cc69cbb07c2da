"""Sites of a model whose products the GPU shares with the processor (`far_products.py`), loaded: what lies where in the
memory that both reach, and what of a matrix the GPU reads."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.codecs.zigzag import BAND_ROWS
from sparsepack.formats.packed import PackedSite
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_sites, loaded_site
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.far import FarProduct
from sparsepack.runtime.cuda.products.tile_config import far_tile_config
from sparsepack.runtime.hybrid.far_products import FarMatrix
from sparsepack.runtime.hybrid.handover import HandOver

WAIT_MILLISECONDS = 10_000
"""The GPU waits no longer for an answer, which takes less than a millisecond."""


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
        for name, site in sites.items():
            if (block, name) in self._places:
                found[name] = self._shared(block, name, site)
            else:
                found |= load_sites({name: site}, self._device, self._kernels, places[name])
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

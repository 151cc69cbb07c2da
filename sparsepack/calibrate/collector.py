"""What a collector is, a kind of statistic that one pass over text counts in every decoder block; and the vectors that
enter a site with what is counted of them together: on an NVIDIA GPU one kernel reads them once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from sparsepack.calibrate import histogram
from sparsepack.errors import UserError
from sparsepack.models.family import Family
from sparsepack.models.hf_config import by_length, rotary_settings
from sparsepack.models.hf_model.blocks import BlockStream, Record
from sparsepack.models.hf_model.fused import Parts
from sparsepack.progress import say


def _added(one: Tensor, other: Tensor) -> Tensor:
    """The sum in the place of the first, on a GPU where one of them is there: the other comes from a file or another
    worker."""
    device = other.device if one.device.type == "cpu" else one.device
    return one.to(device).add_(other.to(device))


@dataclass(frozen=True)
class Collector:
    """Named tensors counted at one kind of place, which add up over batches and over calibrations.

    at    -- "site": of each site's `SiteInput`;
             "attention": of the query [B, heads, S, D] and key [B, kv_heads, S, D] of the block's attention, and how
             many tokens a query sees at most, itself included (0: all before it);
             "window": the same of whole windows, the first positions too, which are left out elsewhere;
             "neurons": of the `SiteInput` of the last matrix of the block's MLP, unless it has experts;
             "experts": of the experts that each token has, int64 [B, S, used], and how many there are, of an MLP that
             has experts;
             "residual": of the residual stream [B, S, hidden] as it enters a norm, and that norm's epsilon, in families
             that say who reads the stream;
             "outputs": in the same families, of what the heads of attention give, as it enters o [B, S, heads * D], and
             how many KV heads there are, and D
    names -- of its tensors; in the file `layers.LAYER.PLACE.NAME`, with the site's name as PLACE, or else "neurons",
             "experts" and "residual" for what is counted of these, and "attention" for all others
    dtype, shape -- of each of them; 0 stands for a size that depends on the model
    count -- of what comes to such a place, a tensor for every name, in `dtype` or a narrower type, on the device where
             it was: a GPU does not wait
    add   -- what was counted in one part and in another, as that of both; it may take the place of the first
    signed -- whether a tensor may be below zero
    of_runs -- whether it is counted over a run of consecutive blocks, of which only the last has it
    later -- whether a calibration from before it was counted, or of another family, is one without it
    """

    at: Literal["site", "attention", "window", "neurons", "experts", "residual", "outputs"]
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: Callable[..., tuple[Tensor, ...]]
    add: Callable[[Tensor, Tensor], Tensor] = _added
    signed: bool = False
    of_runs: bool = False
    later: bool = False


@torch.no_grad()
def column_norms(block: nn.Module, family: Family, site: str, layer: int = 0) -> torch.Tensor:
    """||W[:, j]|| of a site's stacked matrix, that of all experts where it has experts: float32 [columns]."""
    projections = family.of_block(block).projections_of(layer)[site]
    weights = [block.get_parameter(family.weight(projection)) for projection in projections]
    # One expert at a time: a copy in float32 of all of them would be as large as two blocks.
    matrices = [matrix for weight in weights for matrix in (weight if weight.dim() == 3 else (weight,))]
    # A shared expert may be wider than the others: its parts are experts like them.
    columns = weights[0].shape[-1]
    sums = torch.empty(len(matrices), columns, device=weights[0].device)
    # Experts share room for their squares: a host's heap would keep a hole for each, where their sums lie between.
    room = torch.empty(0, device=sums.device)
    for matrix, into in zip(matrices, sums, strict=True):
        room = room if room.shape == matrix.shape else torch.empty(matrix.shape, device=sums.device)
        torch.sum(torch.square(matrix.float(), out=room).sum(0).view(-1, columns), 0, out=into)
    return sums.sum(0).sqrt()


def channel_weights(criterion: str, block: nn.Module, family: Family, site: str, layer: int = 0) -> torch.Tensor | None:
    """c of a criterion: None for `magnitude` (all ones), float32 [columns] for `column-norm`."""
    return None if criterion == "magnitude" else column_norms(block, family, site, layer)


@cache
def kernels_on(device: torch.device) -> bool:
    """Whether our kernels count on a device. Where they cannot on a GPU, why is said, once."""
    if device.type != "cuda":
        return False
    from sparsepack.runtime.cuda.driver.device import usable

    try:
        usable(device)
    except UserError as error:
        say(f"note: {device}: statistics are counted by PyTorch alone, which takes longer ({error})")
        return False
    return True


def parts_on(device: torch.device) -> Parts | None:
    """The parts of stock blocks that our kernels do at once on a device, as far as they gave there what stock code
    gives; None: all is left to stock code."""
    if not kernels_on(device):
        return None
    from sparsepack.runtime.cuda.calibration import checked_parts

    return checked_parts(device)


def recorder_on(stream: BlockStream) -> Record | None:
    """What records runs of blocks of a stream, or None. Experts are chosen by a run that waits for the GPU,
    and so are the frequencies of rotary embeddings that depend on a text's length."""
    source = stream.source
    if not kernels_on(stream.device) or source.family.experts is not None or not source.family.has_row:
        return None
    if source.family.rotary != "none" and any(by_length(of) for of in rotary_settings(source.config)):
        return None
    from sparsepack.runtime.cuda.driver.device import Recorder

    return Recorder(stream.device)


class SiteCounts(NamedTuple):
    """What is counted of a site's input.

    scores  -- int64 [2, histogram.BINS], of |x| and of |x| times the norms of columns
    squares -- float64 [columns], sums of x * x over tokens
    active  -- int64 [columns], tokens for which a column is not zero; None where nobody asked
    each    -- integers [tokens], columns that are not zero for a token; likewise
    """

    scores: Tensor
    squares: Tensor
    active: Tensor | None
    each: Tensor | None


@dataclass(frozen=True)
class SiteInput:
    """What enters a site.

    x            -- [B, S, columns]; of experts [B, S, experts, columns]
    column_norms -- of the site's matrix, float32 [columns]
    neurons      -- whether the columns are an MLP's neurons
    """

    x: Tensor
    column_norms: Tensor
    neurons: bool = False

    @property
    def tokens(self) -> int:
        """How many vectors there are."""
        return self.x.numel() // self.x.shape[-1]

    @cached_property
    def counted(self) -> SiteCounts:
        """What is counted of it, on its device. A GPU is not waited for."""
        if kernels_on(self.x.device):
            from sparsepack.runtime.cuda.calibration import count_site

            x = self.x.flatten(1, -2)
            return SiteCounts(*count_site(x, self.column_norms, histogram.BINS, self.neurons))
        return counted_by_torch(self)


def counted_by_torch(site: SiteInput) -> SiteCounts:
    """`SiteInput.counted` on any device."""
    size = site.x.float().abs()
    scores = torch.stack([histogram.count(size), histogram.count(size * site.column_norms)])
    squares = size.square().flatten(0, -2).sum(0, dtype=torch.float64)
    if not site.neurons:
        return SiteCounts(scores, squares, None, None)
    active = (site.x != 0).flatten(0, -2)
    return SiteCounts(scores, squares, active.sum(0), active.sum(1))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices, or of stacks of as many, in float32: [.., M, K] @ [.., K, N] -> [.., M, N].

    Factors of 16 bits on a GPU stay what they are, and tensor cores multiply them; else both become float32 before.
    """
    if a.device.type == "cuda" and a.dtype.itemsize == 2:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()

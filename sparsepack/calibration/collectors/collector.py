"""What a collector is: a kind of statistic that one pass over text counts in every decoder block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


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

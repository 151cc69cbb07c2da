"""What several sequences compute together, by the stock model: the oracle of batches."""

import torch
from packed_models import stock_model
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.models.families import FAMILIES
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.sites import active_channels

CLEAR = 1e-4
"""Relative, of an input and its threshold: several times what rounding makes of it."""


class Union:
    """A site function that keeps, at every position, what is active in any of the sequences.

    counts  -- columns kept per (layer, site), summed over positions
    nearest -- how near the largest input of a column came to its threshold, relative to it: whether rounding may decide
    """

    def __init__(self, packed: PackedModel) -> None:
        self.packed = packed
        self.counts: dict[tuple[int, str], int] = {}
        self.nearest = float("inf")

    def __call__(self, layer: int, site: str, x: Tensor) -> Tensor:  # x: [B, S, columns]
        rule = self.packed.layers[layer].sites[site].rule
        if rule is None:
            self.counts[layer, site] = x.shape[1] * x.shape[2]
            return x
        active = active_channels(x, rule).any(0)
        self.counts[layer, site] = int(active.sum())
        rest = torch.zeros(()) if rule.offset is None else rule.offset
        distance = ((x - rest).abs().amax(0) - rule.limits).abs() / rule.limits
        self.nearest = min(self.nearest, float(distance.min()))
        return torch.where(active, x, rest)


@torch.no_grad()
def union_logits(
    packed: PackedModel, sequences: int, length: int, clear: float = CLEAR
) -> tuple[Tensor, Tensor, Union]:
    """Of 200 random texts [B, S] those with inputs clearest of their thresholds, by more than `clear`, relative, so
    that rounding decides about no column; their logits [B, S, V], every position sparse; and what was kept.

    The clearest, not the first that are clear: thresholds are computed, too, and processors round them differently.
    """
    model = stock_model(packed)
    found: list[tuple[Tensor, Tensor, Union]] = []
    for seed in range(200):
        bits = torch.Generator().manual_seed(seed)
        texts = torch.randint(packed.architecture.vocabulary, (sequences, length), generator=bits)
        watch = Union(packed)
        with site_hooks(list(enumerate(model.model.layers)), FAMILIES[packed.architecture.model_type], watch):
            found.append((texts, model(texts).logits, watch))
    clearest = max(found, key=lambda each: each[2].nearest)
    assert clearest[2].nearest > clear, "no texts whose inputs are clear of the thresholds"
    return clearest

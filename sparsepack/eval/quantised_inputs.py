"""Inputs of sites as a quantised product takes them: rounded, token by token, and back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from sparsepack.formats.codecs.symmetric import dequantised, quantise_rows
from sparsepack.models.family import Family
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.stock.hooks import site_hooks


@contextmanager
def quantised_inputs(
    blocks: Sequence[tuple[int, nn.Module]], family: Family, types: Mapping[SiteKey, torch.dtype]
) -> Iterator[None]:
    """Within the context, the (layer, block) pairs see the inputs of sites as values of these types with one scale for
    each token (`formats.codecs.symmetric`): what the kernels multiply, but for the order in which they add."""

    def rounded(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        dtype = types.get((layer, site))
        return None if dtype is None else dequantised(*quantise_rows(x, dtype)).to(x.dtype)

    if not types:
        yield
        return
    with site_hooks(blocks, family, rounded):
        yield

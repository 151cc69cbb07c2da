"""Thresholds of a model with random weights: real ones for it.

For each site in the order of execution it is the quantile of |x| over random tokens, everything upstream already
sparse. The columns that are active then spread at random from token to token; a trained model's cluster more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.packed import PackedModel
from sparsepack.models.sites import SiteRule
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.chained.layer import LoadedDenseMlp, LoadedExpertMlp, LoadedSite
from sparsepack.runtime.reference.backend import ReferenceOperations

CALIBRATION_TOKENS = 256
Thresholds = Mapping[tuple[int, str], float]
"""The threshold of each (layer, site)."""
Limits = Mapping[tuple[int, str], Tensor]
"""The thresholds of each (layer, site): of the levels of planes, float32 [levels], or one, float32 [1]."""
LEVELS = (0.2, 0.35, 0.6, 1.1, 2.1)
"""Thresholds of levels to each other: a plane of one bit more for about each doubling of an input."""
Kept = Callable[[tuple[int, str], Tensor], Tensor]


def with_thresholds(packed: PackedModel, thresholds: Thresholds) -> PackedModel:
    """The same model with the rules replaced; sites not named become dense."""
    layers = []
    for number, layer in enumerate(packed.layers):
        sites = {}
        for name, site in layer.sites.items():
            value = thresholds.get((number, name))
            rule = None if value is None else SiteRule(torch.tensor(value, dtype=torch.float32))
            sites[name] = replace(site, rule=rule)
        mlp = replace(layer.mlp, sites={name: sites.pop(name) for name in layer.mlp.sites})
        layers.append(replace(layer, attention=sites, mlp=mlp))
    return replace(packed, layers=tuple(layers))


class _Stored(ReferenceOperations):
    """The reference's operations on matrices that stay as they are stored, each decoded when it is multiplied."""

    load_zigzag = load_rows = staticmethod(lambda matrix, device: matrix)  # type: ignore[assignment]
    zigzag_matmul = staticmethod(lambda matrix, x: F.linear(x, decode_matrix(matrix)))  # type: ignore[assignment]
    matmul = staticmethod(lambda matrix, x: F.linear(x, decode_matrix(matrix)))  # type: ignore[assignment]


def with_limits(packed: PackedModel, limits: Limits) -> PackedModel:
    """The same model of planes with a rule of levels at every site that is named, the same for all of its columns."""
    layers = []
    for number, layer in enumerate(packed.layers):
        sites = {}
        for name, site in layer.sites.items():
            rule = SiteRule(torch.ones(site.matrix.columns), steps=limits[number, name].cpu())
            sites[name] = replace(site, rule=rule)
        mlp = replace(layer.mlp, sites={name: sites.pop(name) for name in layer.mlp.sites})
        layers.append(replace(layer, attention=sites, mlp=mlp))
    return replace(packed, layers=tuple(layers))


def find_thresholds(packed: PackedModel, sparsities: Iterable[float]) -> dict[float, Thresholds]:
    """For each sparsity a threshold per (layer, site)."""

    def threshold_of(size: Tensor, sparsity: float) -> Tensor:
        return size.flatten().kthvalue(max(1, round(sparsity * size.numel()))).values[None]

    found = find_limits(packed, sparsities, threshold_of)
    return {sparsity: {place: float(limits) for place, limits in of.items()} for sparsity, of in found.items()}


def find_levels(packed: PackedModel, bits: Iterable[float]) -> dict[float, Limits]:
    """For each number of bits read of a weight, thresholds of levels per (layer, site), in the ratios of `LEVELS`."""
    levels = packed.layers[0].attention["attn_in"].matrix.levels

    def limits_of(size: Tensor, bits: float) -> Tensor:
        return limits_reading(size, bits, levels)

    return find_limits(packed, bits, limits_of)


def limits_reading(size: Tensor, bits: float, levels: Sequence[int]) -> Tensor:
    """Return thresholds of levels in the ratios of `LEVELS`, with which so many bits of a weight are read where inputs
    are of these sizes. levels: bytes of a superblock at each, as `PackedMatrix.levels`"""
    ratios = torch.tensor(LEVELS, device=size.device)
    more = torch.tensor([0, *levels], dtype=torch.float32, device=size.device).diff()
    ordered = size.flatten().sort().values
    low, high = float(size.mean()) / 100, float(size.mean()) * 100
    for _ in range(40):
        middle = (low * high) ** 0.5
        above = 1 - torch.searchsorted(ordered, middle * ratios, right=True) / ordered.numel()
        low, high = (middle, high) if float((above * more).sum()) / 32 > bits else (low, middle)
    return middle * ratios


@torch.inference_mode()
def find_limits(
    packed: PackedModel, targets: Iterable[float], limits_of: Callable[[Tensor, float], Tensor]
) -> dict[float, dict[tuple[int, str], Tensor]]:
    """For each target thresholds per (layer, site): one pass over random tokens each, in float32, by the reference's
    decoder, whose products are watched. limits_of: of the sizes of a site's inputs, and a target"""
    device = packed.output_norm.device
    generator = torch.Generator(device=device).manual_seed(1)
    ids = torch.randint(packed.architecture.vocabulary, (CALIBRATION_TOKENS,), device=device, generator=generator)
    decoder = OperationsDecoder(with_thresholds(packed, {}), _Stored(), device, CALIBRATION_TOKENS, None, "f32")
    places: dict[int, tuple[int, str]] = {}
    for number, layer in enumerate(decoder._layers):
        sites = layer.mlp.sites if isinstance(layer.mlp, LoadedDenseMlp) else {}
        places |= {id(site): (number, name) for name, site in {**layer.attention, **sites}.items()}
    of_experts = {id(layer.mlp): number for number, layer in enumerate(decoder._layers)}
    found: dict[float, dict[tuple[int, str], Tensor]] = {}
    product, selected = LoadedSite.product, LoadedExpertMlp._selected
    for target in targets:
        found[target] = {}

        def kept(place: tuple[int, str], x: Tensor, target: float = target) -> Tensor:
            size = x.abs()
            limits = found[target][place] = limits_of(size, target)
            return torch.where(size > limits[0], x, 0)

        def of_site(site: LoadedSite, x: Tensor, *more: Any, kept: Kept = kept) -> Tensor:
            return product(site, kept(places[id(site)], x), *more)

        def of_expert(mlp: LoadedExpertMlp, name: str, x: Tensor, *more: Any, kept: Kept = kept) -> tuple[Tensor, bool]:
            return selected(mlp, name, kept((of_experts[id(mlp)], name), x), *more)

        decoder.reset()
        with patch.object(LoadedSite, "product", of_site), patch.object(LoadedExpertMlp, "_selected", of_expert):
            decoder.prefill(0, ids.cpu())
    return dict(found)

"""What one pass over text collects: per site histograms and second moments, per layer attention channels."""

from dataclasses import dataclass, field

import torch

from sparsepack.calibrate.collectors import histogram
from sparsepack.calibrate.criteria import CRITERIA
from sparsepack.models.families import SITES


@dataclass
class SiteStatistics:
    """Running sums for one site.

    histograms    -- criterion -> int64 [histogram.BINS], counts of the score over tokens and channels
    second_moment -- float64 [columns], sum over tokens of x_j**2
    """

    columns: int
    histograms: dict[str, torch.Tensor] = field(default_factory=dict)
    second_moment: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        if not self.histograms:
            self.histograms = {c: torch.zeros(histogram.BINS, dtype=torch.int64) for c in CRITERIA}
            self.second_moment = torch.zeros(self.columns, dtype=torch.float64)

    def add(self, x: torch.Tensor, column_norms: torch.Tensor) -> None:
        """Count hidden vectors x [..., columns]."""
        size = x.float().abs()
        self.histograms["magnitude"] += histogram.count(size).cpu()
        self.histograms["column-norm"] += histogram.count(size * column_norms).cpu()
        self.second_moment += size.square().flatten(0, -2).sum(0, dtype=torch.float64).cpu()

    def __add__(self, other: "SiteStatistics") -> "SiteStatistics":
        counts = {name: self.histograms[name] + other.histograms[name] for name in CRITERIA}
        return SiteStatistics(self.columns, counts, self.second_moment + other.second_moment)


@dataclass
class AttentionStatistics:
    """Running sums over tokens, after rotary embedding and q/k norms: for Double Sparsity's heavy channels (4.1).

    Sums of |q| and q**2: float64 [heads, head_dim]; of |k| and k**2: float64 [kv_heads, head_dim].
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Count query [B, heads, S, D] and key [B, kv_heads, S, D]."""
        for name, value in (("query", query), ("key", key)):
            for kind, amount in (("abs", value.float().abs()), ("square", value.float().square())):
                total = amount.sum((0, 2), dtype=torch.float64).cpu()
                self.sums[f"{name}_{kind}"] = self.sums.get(f"{name}_{kind}", 0) + total


@dataclass
class LayerStatistics:
    """All statistics of one decoder block."""

    sites: dict[str, SiteStatistics]
    attention: AttentionStatistics = field(default_factory=AttentionStatistics)

    def __add__(self, other: "LayerStatistics") -> "LayerStatistics":
        sites = {site: statistics + other.sites[site] for site, statistics in self.sites.items()}
        sums = {name: value + other.attention.sums[name] for name, value in self.attention.sums.items()}
        return LayerStatistics(sites, AttentionStatistics(sums))

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """As named tensors, for a safetensors file."""
        named = {f"layers.{layer}.attention.{name}": value for name, value in self.attention.sums.items()}
        for site, statistics in self.sites.items():
            prefix = f"layers.{layer}.{site}"
            named[f"{prefix}.second_moment"] = statistics.second_moment
            named |= {f"{prefix}.histogram.{name}": value for name, value in statistics.histograms.items()}
        return named

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], layer: int) -> "LayerStatistics":
        """The inverse of `tensors`; raises KeyError where something is missing."""
        sites = {}
        for site in SITES:
            prefix = f"layers.{layer}.{site}"
            moment = tensors[f"{prefix}.second_moment"]
            counts = {name: tensors[f"{prefix}.histogram.{name}"] for name in CRITERIA}
            sites[site] = SiteStatistics(len(moment), counts, moment)
        prefix = f"layers.{layer}.attention."
        sums = {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}
        return cls(sites, AttentionStatistics(sums))

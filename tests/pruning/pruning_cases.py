"""Inputs, weights and patterns that methods of pruning are tried with."""

import torch
from torch import Tensor

from sparsepack.models.pattern import Pattern
from sparsepack.reconstruction import Inputs, Sums

PATTERNS = [
    Pattern(2, 4),
    Pattern(4, 6),
    Pattern(4, 8),
    Pattern(6, 8),
    Pattern(8, 10),
    Pattern(10, 12),
    Pattern(14, 16),
]


def tokens(count: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs that depend on each other, some of them large: [count, columns]."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed / columns**0.5 * torch.linspace(0.1, 3, columns)[torch.randperm(columns, generator=generator)]


def known(x: Tensor) -> Inputs:
    """What is known of such inputs, where they are."""
    sums = Sums(x.shape[1], True, x.device)
    for part in x.split(100):
        sums.add(part[None])
    return sums.inputs(0.01)


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))

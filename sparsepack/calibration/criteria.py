"""The criteria of a channel's score |x_j| * c_j: c = 1, or the norm of its column in the stacked matrix."""

from collections.abc import Sequence

import torch
from torch import nn


def column_norms(block: nn.Module, projections: Sequence[str]) -> torch.Tensor:
    """||W[:, j]|| of a site's stacked matrix: float32 [columns]."""
    squares = [block.get_submodule(name).weight.float().square().sum(0) for name in projections]  # type: ignore[operator]
    return torch.stack(squares).sum(0).sqrt()


def channel_weights(criterion: str, block: nn.Module, projections: Sequence[str]) -> torch.Tensor | None:
    """c of a criterion: None for `magnitude` (all ones), float32 [columns] for `column-norm`."""
    return None if criterion == "magnitude" else column_norms(block, projections)

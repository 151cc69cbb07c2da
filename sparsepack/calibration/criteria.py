"""The criteria of a channel's score |x_j| * c_j: c = 1, or the norm of its column in the stacked matrix."""

import torch
from torch import nn

from sparsepack.models.family import Family


@torch.no_grad()
def column_norms(block: nn.Module, family: Family, site: str) -> torch.Tensor:
    """||W[:, j]|| of a site's stacked matrix, that of all experts where it has experts: float32 [columns]."""
    weights = [block.get_parameter(family.weight(projection)) for projection in family.projections[site]]
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


def channel_weights(criterion: str, block: nn.Module, family: Family, site: str) -> torch.Tensor | None:
    """c of a criterion: None for `magnitude` (all ones), float32 [columns] for `column-norm`."""
    return None if criterion == "magnitude" else column_norms(block, family, site)

"""The columns that a site's product reads on a GPU, dense and sparse."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The columns that a site's product reads, and what the product lacks without the others.

    threshold -- float32 [1] or [columns]; None: every column
    offset    -- taken from the input first: float32 [columns] or None
    bias      -- to add to the product: the site's own and, with an offset, W offset; float32 [rows] or None
    """

    threshold: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None


def load_vector(x: Tensor, device: torch.device) -> Tensor:
    """float32 [n] on a device."""
    return x.detach().to(device, torch.float32).reshape(-1).contiguous()

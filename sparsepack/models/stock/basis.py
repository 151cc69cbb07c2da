"""A change of basis of the residual stream before a decoder block, which stock models do not have.

It is a module of the block, so that its weight has a place among the block's own and is loaded as they are.
"""

from typing import Any

import torch
from torch import nn

from sparsepack.models.family import BASIS


def add_basis(block: nn.Module, hidden: int) -> None:
    """Let a stock decoder block begin with h' = h W^T, W [hidden, hidden] the weight of its module `BASIS`, which is
    without memory until it is loaded."""
    block.add_module(BASIS, nn.Linear(hidden, hidden, bias=False, device="meta"))
    block.register_forward_pre_hook(_change)


def _change(block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    hidden, *more = inputs
    return block.get_submodule(BASIS)(hidden), *more

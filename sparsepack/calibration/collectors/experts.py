"""How many tokens each expert of an MLP was given by the router: what says whether a text has reached them all."""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector


def _count(chosen: Tensor, experts: int) -> tuple[Tensor, ...]:
    used = chosen.shape[-1]
    flat = chosen.flatten()  # bincount would wait for a GPU
    given = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return given, torch.full((1,), chosen.numel() // used, device=chosen.device)


EXPERTS = Collector("experts", ("given", "routed_tokens"), torch.int64, (0,), _count)
"""The counts are int64: [experts], the tokens that each expert was given; [1], the tokens counted."""

"""What blocks compute of each number by itself, as the oracle has it."""

import torch


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What `blocks.CLAMPED_SWIGLU` makes of a gate and what is multiplied with it."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Values kept within a bound: cap tanh(x / cap); 0: as they are."""
    return (x / cap).tanh() * cap if cap else x

"""Soft caps: scores and logits that some models keep within a bound."""

from torch import Tensor


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Values kept within a bound: cap tanh(x / cap); 0: as they are."""
    return (x / cap).tanh() * cap if cap else x

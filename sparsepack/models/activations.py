"""What blocks compute of each number by itself, as the oracle has it."""

import torch


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What `blocks.CLAMPED_SWIGLU` makes of a gate and what is multiplied with it."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def xielu_coefficients(parameters: torch.Tensor) -> torch.Tensor:
    """The numbers that `xielu` takes, of what a block has learned: alpha_p, alpha_n, beta and eps, float32 [4] both."""
    above, below, beta, eps = parameters.unbind()
    softplus = torch.nn.functional.softplus
    return torch.stack([softplus(above), beta + softplus(below), beta, eps])


def xielu(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """beta x + alpha_p x^2 above 0, beta x + alpha_n (expm1(min(x, eps)) - x) elsewhere (arXiv 2411.13010)."""
    above, below, beta, eps = coefficients.unbind()
    return beta * x + torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Values kept within a bound: cap tanh(x / cap); 0: as they are."""
    return (x / cap).tanh() * cap if cap else x

"""Activations and caps, elementwise, in plain torch."""

import torch


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's function of gate and up, of any shape (`blocks.CLAMPED_SWIGLU`)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def xielu_coefficients(parameters: torch.Tensor) -> torch.Tensor:
    """Return what `xielu` takes, float32 [4]: alpha_p, alpha_n, beta and eps.

    parameters -- float32 [4], as a block has learned them: alpha_p and alpha_n before softplus, the latter without beta
    """
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

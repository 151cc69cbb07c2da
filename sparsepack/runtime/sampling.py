"""Choose the next token from the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature -- divides the logits; 0 always takes the likeliest token (the lowest id of equals)
    top_k       -- only the k likeliest may be chosen; None: all
    top_p       -- only the fewest likeliest that together have this probability; None: all
    seed        -- of the random numbers

    Raises `UserError` for a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: expected 0 (always the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: expected more than 0 and at most 1")


class Sampler:
    """Chooses tokens one after the other; the same logits and seed give the same tokens, on every device."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """A token id from the logits, [vocabulary] of any device. Raises `ArtifactError` where they are not numbers."""
        logits = logits.detach().to("cpu", torch.float64)
        best = logits.max()
        if not best.isfinite():
            raise not_finite(float(best))
        if self.sampling.temperature == 0:
            return int((logits == best).nonzero()[0])
        ordered, ids = ((logits - best) / self.sampling.temperature).sort(descending=True, stable=True)
        if self.sampling.top_k is not None:
            ordered = ordered[: self.sampling.top_k]
        # The largest is 0 now, so that no exponential overflows.
        cumulative = ordered.exp().cumsum(0)
        total = cumulative[-1]
        if self.sampling.top_p is not None:
            kept = int((cumulative < self.sampling.top_p * total).sum()) + 1
            total = cumulative[min(kept, len(cumulative)) - 1]
        return int(ids[int(torch.searchsorted(cumulative, self.draw() * total))])

    def draw(self) -> float:
        """The next random number in [0, 1), of which a choice takes one unless the temperature is 0."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def not_finite(best: float) -> ArtifactError:
    """The error where the largest logit is no number."""
    return ArtifactError(f"the model's largest logit is {best}; its weights overflowed or are damaged")

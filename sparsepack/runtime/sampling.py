"""Choose the next token from the logits."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, UserError
from sparsepack.option import LARGEST_COUNT


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature -- divides the logits; 0 always takes the likeliest token (the lowest id of equals)
    top_k       -- only the k likeliest may be chosen; None: all
    top_p       -- only the fewest likeliest that together have this probability; None: all
    seed        -- of the random numbers
    repeat_penalty -- what makes tokens less likely that stand in the text already, as llama.cpp defines it: a positive
                   logit is divided by it, another one multiplied, once for each token however often it stands there;
                   1: nothing is done
    repeat_last_n -- how many of the last tokens count as there, those of the prompt included; -1: all, 0: none

    Raises `UserError` for a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: expected 0 (always the likeliest token) or more")
        if self.top_k is not None and not 1 <= self.top_k <= LARGEST_COUNT:
            raise UserError(f"top-k {self.top_k}: expected 1 to {LARGEST_COUNT}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: expected more than 0 and at most 1")
        if not 0 < self.repeat_penalty < float("inf"):
            raise UserError(f"repeat penalty {self.repeat_penalty}: expected more than 0; 1 does nothing")
        if not -1 <= self.repeat_last_n <= LARGEST_COUNT:
            raise UserError(f"repeat-last-n {self.repeat_last_n}: expected 0 (none) to {LARGEST_COUNT}, or -1 (all)")

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before are less likely."""
        return self.repeat_penalty != 1 and self.repeat_last_n != 0


class Sampler:
    """Chooses tokens one after the other; the same logits and seed give the same tokens, on every device.

    before -- ids of the text so far, for the repeat penalty

    A device does not know which tokens were there before: where `sampling.penalises`, every choice is `choose`'s, on
    the host, and tokens that something else chose are not counted.
    """

    def __init__(self, sampling: Sampling, before: Iterable[int] = ()) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        last = sampling.repeat_last_n
        self._recent = deque(before, maxlen=None if last < 0 else last)

    def choose(self, logits: Tensor) -> int:
        """A token id from the logits, [vocabulary] of any device. Raises `ArtifactError` where they are not numbers."""
        logits = logits.detach().to("cpu", torch.float64)
        if not (best := logits.max()).isfinite():
            raise not_finite(float(best))
        if not self.sampling.penalises:
            return self._chosen(logits)
        id = self._chosen(penalised(logits, self._recent, self.sampling.repeat_penalty))
        self._recent.append(id)
        return id

    def _chosen(self, logits: Tensor) -> int:
        best = logits.max()
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


def penalised(logits: Tensor, recent: Iterable[int], penalty: float) -> Tensor:
    """The logits with those of recent tokens made smaller: divided by the penalty where positive, else multiplied.

    They stay finite whatever the penalty: among infinite ones none could be drawn.
    """
    ids = torch.tensor(sorted(set(recent)), dtype=torch.int64)
    found, limits = logits[ids], torch.finfo(logits.dtype)
    changed = torch.where(found > 0, found / penalty, found * penalty)
    return logits.index_put((ids,), changed.clamp(limits.min, limits.max))


def not_finite(best: float) -> ArtifactError:
    """The error where the largest logit is no number."""
    return ArtifactError(f"the model's largest logit is {best}; its weights overflowed or are damaged")

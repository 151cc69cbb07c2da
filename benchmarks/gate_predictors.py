"""Predictors of who is active in an MLP: each gives every neuron of a layer a score, and those above a threshold are
predicted. What a predictor holds, it holds in the types that count as its memory.

    ExactGate  the gate matrix itself: no prediction, the control
    Frequency  how often a neuron is active, whatever the token
    Previous   who was active for the token before, then by frequency
    Copied     the gate matrix in one or two bits a weight, untrained
    LowRank    two thin matrices in float16: the gate's best approximation on a text, untrained, or trained on who was
               active, with ReLU between them, by the state of the same layer or of the one before (KAIROX, section 5.1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.formats.codecs.gate_rows import GateCopy

BATCH = 64
"""Tokens of a training step."""
RATE = 4e-3
"""The learning rate of the first step; it falls to zero along a cosine."""


@dataclass(frozen=True)
class Seen:
    """What a predictor may look at in one layer, of windows of S tokens.

    here   -- float32 [B, S, d], what enters the MLP
    before -- the same of the layer before; in the first layer, of the token before
    active -- bool [B, S, n], who was active for the token before
    """

    here: Tensor
    before: Tensor
    active: Tensor


def seen(here: Tensor, layer_before: Tensor | None, active: Tensor) -> Seen:
    """What a predictor may look at, from what it needs.

    here, layer_before -- what enters the MLP of a layer and of the one before, [B, S, d]; None in the first layer
    active             -- who is active in it, bool [B, S, n]
    """
    return Seen(here, _token_before(here) if layer_before is None else layer_before, _token_before(active))


def _token_before(of: Tensor) -> Tensor:
    """Nothing before the first token."""
    return torch.cat([torch.zeros_like(of[:, :1]), of[:, :-1]], dim=1)


class Predictor(Protocol):
    """What predicts who is active in one layer."""

    @property
    def nbytes(self) -> int:
        """Memory, of one layer."""

    def scores(self, seen: Seen) -> Tensor:
        """Float32 [B, S, n]: the higher, the likelier a neuron is active."""


@dataclass(frozen=True)
class ExactGate:
    """`weight` [n, d], as the checkpoint has it."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def scores(self, seen: Seen) -> Tensor:
        return functional.linear(seen.here, self.weight.float())


@dataclass(frozen=True)
class Frequency:
    """`share` of the tokens for which each neuron is active: float16 [n]."""

    share: Tensor

    @property
    def nbytes(self) -> int:
        return self.share.nbytes

    def scores(self, seen: Seen) -> Tensor:
        return self.share.float().expand(*seen.here.shape[:-1], -1)


@dataclass(frozen=True)
class Previous:
    """Those that were active for the token before come first. It is told who they were, as if all gates had been
    computed then; a bit for each is its memory, beside the frequencies."""

    frequency: Frequency

    @property
    def nbytes(self) -> int:
        return self.frequency.nbytes + -(-len(self.frequency.share) // 8)

    def scores(self, seen: Seen) -> Tensor:
        # Frequencies are shares: nobody overtakes who was active, and two is above all who were not.
        return self.frequency.scores(seen) + 2 * seen.active


@dataclass(frozen=True)
class Copied:
    """The gate matrix in `copy.bits` a weight."""

    copy: GateCopy

    @property
    def nbytes(self) -> int:
        return self.copy.nbytes

    def scores(self, seen: Seen) -> Tensor:
        return functional.linear(seen.here, self.copy.decoded())


@dataclass(frozen=True)
class LowRank:
    """outer @ inner @ x, with ReLU after `inner` where it is trained.

    inner    -- float16 [rank, d]
    outer    -- float16 [n, rank]
    relu     -- whether negative products with `inner` become zero
    adjacent -- whether x is the state before, instead of the layer's own
    """

    inner: Tensor
    outer: Tensor
    relu: bool = False
    adjacent: bool = False

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.outer.nbytes

    def scores(self, seen: Seen) -> Tensor:
        middle = functional.linear(seen.before if self.adjacent else seen.here, self.inner.float())
        return functional.linear(middle.relu() if self.relu else middle, self.outer.float())


def rank_within(nbytes: int, weight: Tensor) -> int:
    """The largest rank of a `LowRank` for a gate [n, d] that takes no more memory."""
    return nbytes // (2 * sum(weight.shape))


def principal(weight: Tensor, inputs: Tensor, ranks: Sequence[int]) -> list[LowRank]:
    """The gates of lower ranks that, of all such, have products with `inputs` [T, d] the least squared error from those
    of `weight` [n, d].

    With M the second moment of the inputs it is the singular value decomposition of weight @ M^(1/2), cut off. Its left
    vectors U are the eigenvectors of weight @ M @ weight', and the approximation is U U' weight: M needs no inverse.
    """
    gate, inputs = weight.double(), inputs.double()
    vectors = torch.linalg.eigh(gate @ (inputs.T @ inputs) @ gate.T).eigenvectors
    return [LowRank((vectors[:, -rank:].T @ gate).half(), vectors[:, -rank:].half()) for rank in ranks]


@torch.enable_grad()
def trained(inputs: Tensor, active: Tensor, rank: int, epochs: int, adjacent: bool) -> LowRank:
    """Trained with binary cross-entropy on states, float32 [T, d], and who is active, bool [T, n]; always the same."""
    generator = torch.Generator().manual_seed(0)
    size = float(inputs.square().mean().sqrt())
    shapes = {"inner": (rank, inputs.shape[1]), "outer": (active.shape[1], rank)}
    factors = {
        name: (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(inputs.device).requires_grad_()
        for name, shape in shapes.items()
    }
    steps = epochs * -(-len(inputs) // BATCH)
    optimiser = torch.optim.AdamW(factors.values(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(inputs), generator=generator).to(inputs.device), BATCH):
            logits = functional.linear(
                functional.linear(inputs[rows] / size, factors["inner"]).relu(), factors["outer"]
            )
            loss = functional.binary_cross_entropy_with_logits(logits, active[rows].float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    # The sigmoid is left out, which ranks nobody differently, and so is the size of the inputs.
    return LowRank(*(factor.detach().half() for factor in factors.values()), relu=True, adjacent=adjacent)


def thresholds(scores: Tensor, counts: Sequence[int]) -> list[float]:
    """Above which as many of all scores are as each of `counts` says, or fewer where some are equal."""
    ordered = np.sort(scores.float().cpu().numpy(), axis=None)
    return [float(ordered[-1 - count]) if count < len(ordered) else -np.inf for count in counts]

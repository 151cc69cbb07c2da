"""What is trained of the matrices of a model's blocks, and how a model computes with it.

All weights of a matrix W [rows, columns] are trained, as a copy in float32, or a low-rank update (LoRA, 2106.09685)

    W' x = W x + B A x,   A [rank, columns], B [rows, rank]

of which B begins at zero, so that the model begins as it was. Zeros of a pruned matrix stay zeros: they have no
gradient, and Adam leaves a number alone that never had one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES


class Update(ABC):
    """A matrix as far as it is trained."""

    @property
    @abstractmethod
    def trained(self) -> list[Tensor]:
        """Everything that an optimiser trains, float32 leaves on the device."""

    @abstractmethod
    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """What the linear makes of x [..., columns] with the trained matrix in place of its own: [..., rows]."""

    @abstractmethod
    def merged(self, weight: Tensor) -> Tensor:
        """The trained matrix, from the one that it was: float64 [rows, columns] each, on the CPU."""


@dataclass(frozen=True)
class AllWeights(Update):
    """weight -- of the matrix itself, float32 [rows, columns]."""

    weight: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype), linear.bias)

    def merged(self, weight: Tensor) -> Tensor:
        return self.weight.detach().cpu().double()


@dataclass(frozen=True)
class LowRank(Update):
    """down, up -- A and B, float32 [rank, columns] and [rows, rank]."""

    down: Tensor
    up: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.down, self.up]

    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        few = functional.linear(x, self.down.to(x.dtype))
        return functional.linear(x, linear.weight, linear.bias) + functional.linear(few, self.up.to(x.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        return weight + self.up.detach().cpu().double() @ self.down.detach().cpu().double()


def matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of the tensors that are trained: the matrices of all blocks, in order of execution."""
    family = checkpoint.family
    blocks = map(family.block, range(checkpoint.layers))
    return [f"{block}.{name}.weight" for block in blocks for site in SITES for name in family.projections[site]]


def first_updates(
    checkpoint: Checkpoint, rank: int | None, seed: int, device: str, pruned: Collection[str] = ()
) -> dict[str, Update]:
    """What is trained of each matrix, as it begins; it changes nothing yet.

    rank   -- None: all weights
    pruned -- the names of matrices whose zeros stay zeros, where all weights are trained
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Update] = {}
    for name in matrices(checkpoint):
        if rank is None:
            weight = checkpoint.tensor(name).to(device, torch.float32, copy=True)
            zeros = weight == 0 if name in pruned else None
            made[name] = AllWeights(weight.requires_grad_(True))
            if zeros is not None:
                weight.register_hook(partial(_without, zeros))  # type: ignore[no-untyped-call]
        else:
            rows, columns = checkpoint.source.shapes[name]
            down = (torch.randn(rank, columns, generator=generator) * columns**-0.5).to(device)
            up = torch.zeros(rows, rank, device=device)
            made[name] = LowRank(down.requires_grad_(True), up.requires_grad_(True))
    return made


def _without(zeros: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that is zero where the matrix is."""
    return gradient.masked_fill(zeros, 0.0)


@contextmanager
def trained_with(model: Any, updates: Mapping[str, Update]) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within the context a stock model computes with updates, by the names of their tensors. Yields what gives it its
    own weights for a while."""
    own = False

    @contextmanager
    def as_it_was() -> Iterator[None]:
        nonlocal own
        own = True
        try:
            yield
        finally:
            own = False

    def forward_of(linear: nn.Linear, update: Update) -> Callable[[Tensor], Tensor]:
        plain = linear.forward
        return lambda x: plain(x) if own else update.product(linear, x)

    linears = {name: model.get_submodule(name.removesuffix(".weight")) for name in updates}
    for name, linear in linears.items():
        linear.forward = forward_of(linear, updates[name])
    try:
        yield as_it_was
    finally:
        for linear in linears.values():
            del linear.forward  # the class's own

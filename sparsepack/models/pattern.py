"""Structured sparsity: at most `keep` nonzeros in every `of` consecutive inputs of an output row.

Groups lie on one grid along the inputs, from the first input on. Where `of` does not divide their number, the last
group is shorter, and counts as if zeros followed it: it may hold as many nonzeros as any other.

Imports no torch, so that options can name the largest group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsepack.errors import PackingError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_GROUP = 16
"""The most inputs of a group of which some weights stay."""


@dataclass(frozen=True)
class Pattern:
    """Keep `keep` of every `of` inputs. Raises `PackingError` for numbers that mean nothing or are too large."""

    keep: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.keep < self.of <= LARGEST_GROUP:
            raise PackingError(f"keep {self.keep} of {self.of}: expected 1 <= keep < of <= {LARGEST_GROUP}")

    def __str__(self) -> str:
        return f"keep {self.keep} of {self.of}"

    @property
    def density(self) -> float:
        """Share of the weights that stay."""
        return self.keep / self.of

    def groups(self, columns: int) -> int:
        """How many groups so many inputs make, the last perhaps shorter."""
        return -(-columns // self.of)

    def tail(self, columns: int) -> int:
        """Inputs in the last group where it is shorter; else 0."""
        return columns % self.of


def grouped(values: Tensor, pattern: Pattern) -> Tensor:
    """[..., columns] -> [..., groups, of]: what belongs to each group, zeros after a shorter last one."""
    padded = filled(values, pattern.of)
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // pattern.of, pattern.of)


def filled(values: Tensor, multiple: int) -> Tensor:
    """The last dimension with zeros after it up to a multiple; the values themselves where it is one."""
    from torch.nn.functional import pad

    missing = -values.shape[-1] % multiple
    return pad(values, (0, missing)) if missing else values  # `pad` would copy them


def ungrouped(groups: Tensor, columns: int) -> Tensor:
    """The inverse of `grouped`."""
    return groups.flatten(-2)[..., :columns]


def kept(scores: Tensor, pattern: Pattern) -> Tensor:
    """The mask of what stays: in each group the inputs of the highest scores, of equal ones the first.

    scores: floating [..., columns], finite, at least 0. Returns bool [..., columns].
    """
    import torch

    # What follows a shorter last group is chosen after all else.
    groups = grouped(scores, pattern)
    if tail := pattern.tail(scores.shape[-1]):
        groups[..., -1, tail:] = -1
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., : pattern.keep], True)
    return ungrouped(mask, scores.shape[-1])


def check_pattern(weight: Tensor, pattern: Pattern) -> None:
    """Raise `PackingError` naming the first row and inputs of a matrix [rows, columns] that hold too many nonzeros."""
    counts = grouped((weight != 0).int(), pattern).sum(-1)
    wrong = counts > pattern.keep
    if wrong.any():
        row, group = (int(n) for n in wrong.nonzero()[0])
        first = group * pattern.of
        last = min(first + pattern.of, weight.shape[1]) - 1
        raise PackingError(
            f"row {row} has {int(counts[row, group])} nonzeros in its inputs {first} to {last}, "
            f"{pattern} allows {pattern.keep} ({int(wrong.sum())} such groups); run `sparsepack prune` first"
        )

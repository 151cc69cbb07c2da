"""Structured sparsity: at most `keep` nonzeros in every `of` consecutive inputs of an output row.

Imports no torch, so that options can name the largest group. What belongs to each group of a tensor is in `groups`.
"""

from dataclasses import dataclass

from sparsepack.errors import PackingError

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

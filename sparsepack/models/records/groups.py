"""A tensor's groups of inputs, in which structured sparsity (`pattern`) keeps some weights.

Groups lie on one grid along the inputs, from the first input on. Where `of` does not divide their number, the last
group is shorter, and counts as if zeros followed it: it may hold as many nonzeros as any other.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsepack.errors import PackingError
from sparsepack.models.records.pattern import Pattern


def grouped(values: Tensor, pattern: Pattern) -> Tensor:
    """[..., columns] -> [..., groups, of]: what belongs to each group, zeros after a shorter last one."""
    padded = filled(values, pattern.of)
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // pattern.of, pattern.of)


def filled(values: Tensor, multiple: int) -> Tensor:
    """The last dimension with zeros after it up to a multiple; the values themselves where it is one."""
    missing = -values.shape[-1] % multiple
    return pad(values, (0, missing)) if missing else values  # `pad` would copy them


def ungrouped(groups: Tensor, columns: int) -> Tensor:
    """The inverse of `grouped`."""
    return groups.flatten(-2)[..., :columns]


def kept(scores: Tensor, pattern: Pattern) -> Tensor:
    """The mask of what stays: in each group the inputs of the highest scores, of equal ones the first.

    scores: floating [..., columns], finite, at least 0. Returns bool [..., columns].
    """
    # What follows a shorter last group is chosen after all else.
    groups = grouped(scores, pattern)
    if tail := pattern.tail(scores.shape[-1]):
        groups[..., -1, tail:] = -1
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., : pattern.keep], True)
    return ungrouped(mask, scores.shape[-1])


def check_pattern(weight: Tensor, pattern: Pattern) -> None:
    """Raise `PackingError` naming the first row and inputs of a matrix [rows, columns] that hold too many nonzeros."""
    counts = grouped((weight != 0).to(torch.int32), pattern).sum(-1)
    wrong = counts > pattern.keep
    if wrong.any():
        row, group = (int(n) for n in wrong.nonzero()[0])
        first = group * pattern.of
        last = min(first + pattern.of, weight.shape[1]) - 1
        raise PackingError(
            f"row {row} has {int(counts[row, group])} nonzeros in its inputs {first} to {last}, "
            f"{pattern} allows {pattern.keep} ({int(wrong.sum())} such groups); run `sparsepack prune` first"
        )

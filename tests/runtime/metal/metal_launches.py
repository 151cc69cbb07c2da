"""A launch of a Metal kernel in several orders of threads and threadgroups, which must give the same bits, and the
lists of columns that launches take and make."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from metal_emulation import Library, order
from torch import Tensor

SEGMENT = 1024
NORM, BIAS, OFFSET, THRESHOLD, PER_CHANNEL, SUM, Q_NORM, K_NORM, CANDIDATES, WITH_LEVELS = (1 << i for i in range(10))
LEVELS = 5
TYPES = ["F32", "F16", "BF16", "Q4_K", "Q6_K", "Q8_0"]
UNSET = 1 << 30
SEEDS = (0, 1, 2)
"""Of the orders in which each launch is made; 0 is that of numbers."""


def random(*shape: int) -> Tensor:
    """Other numbers every run."""
    return torch.randn(shape)


def launched(
    library: Library,
    name: str,
    given: Sequence[Any],
    out: Callable[[], Sequence[Tensor]],
    groups: tuple[int, int] | int,
    threads: int,
) -> list[Tensor]:
    """What a kernel writes, the same in every order.

    given -- arguments in order, of which each None is one of the outputs
    out   -- makes the outputs anew
    """
    across, *down = (groups,) if isinstance(groups, int) else groups
    found = []
    for seed in SEEDS:
        outputs = list(out())
        left = iter(outputs)
        arguments = [next(left) if value is None else value for value in given]
        casts = {i: "int32" for i, value in enumerate(arguments) if isinstance(value, int)}
        with order(seed):
            getattr(library, name)(
                *arguments,
                threads=[across * threads, *down],
                group_size=[threads, *(1 for _ in down)],
                arg_casts=casts,
            )
        found.append(outputs)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(bits(one), bits(same))
    return found[0]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def room(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a list, with what no kernel reads."""
    segments = -(-columns // SEGMENT)
    indices = torch.full((segments * SEGMENT,), UNSET, dtype=torch.int32)
    return torch.full((segments * SEGMENT,), float("nan")), indices, torch.full((2 * segments,), -1, dtype=torch.int32)


def listed(x: Tensor, active: Tensor, levels: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The list of some columns of x, as `collect` makes it; levels: of all columns, None: they are read whole."""
    values, indices, counts = room(len(x))
    of_each = torch.full((len(x),), LEVELS, dtype=torch.int32) if levels is None else levels.int()
    numbers = torch.arange(len(x), dtype=torch.int32) | (0 if levels is None else of_each << 24)
    for segment in range(len(counts) // 2):
        here = active[active // SEGMENT == segment]
        counts[segment], counts[len(counts) // 2 + segment] = len(here), of_each[here].sum()
        places = segment * SEGMENT + torch.arange(len(here))
        values[places], indices[places] = x[here], numbers[here]
    return values, indices, counts


def from_list(values: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a list and their values; beyond them it is untouched."""
    listed, levels = counts.view(2, -1)
    inside = (torch.arange(SEGMENT) < listed[:, None]).flatten()
    of_each = indices.where(inside, 0) >> 24
    assert torch.equal(levels, torch.where(of_each > 0, of_each, inside * LEVELS).view(-1, SEGMENT).sum(1).int())
    assert (indices[~inside] == UNSET).all()
    assert values[~inside].isnan().all()
    return indices[inside].long(), values[inside]


def assert_near(found: Tensor, expected: Tensor, size: Tensor | float = 1.0) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert ((found.double() - expected).abs() <= 2e-6 * (1 + expected.abs()) * size).all()

"""Layer-wise reconstruction: a matrix changes so that its outputs, on inputs that were seen, stay what they were. What
is known of the inputs of a matrix is their second moments, or their products with each other.

The matrices of a site share their inputs, and so do those of all experts at mlp_in. What enters the down matrices of
different experts has nothing in common, channel by channel: each has inputs of its own, and so has a shared expert.

Error feedback goes column by column: what changing a column does to the outputs is put right by the columns that come
after it. That is the loop of SparseGPT (Frantar and Alistarh, 2023) and GPTQ (Frantar et al., 2022), which differ in
what becomes of a column. With U of the inputs' inverse products U^T U, an error in column j, divided by U_jj, times row
j of U is taken off the columns behind it. A column takes all errors of its block when its turn comes, and the columns
behind the block take them in one product.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sparsepack.inverse_factor import inverse_factor, permuted, symmetric_means, transposed
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_MID, Family
from sparsepack.models.hf_config import expert_numbers
from sparsepack.progress import say

_STRIP = 192
"""Products are symmetric: they are summed in strips of so many columns, from the diagonal on."""


@dataclass(frozen=True)
class Inputs:
    """Means over tokens, on the device where a matrix is changed.

    moments  -- of x_j ** 2: float32 [columns]
    products -- of x_i x_j: float32 [columns, columns], where a method needs them
    damping  -- share of the mean moment that is added to all of them, so that the products have an inverse
    levels   -- of a format with planes, the squares of each input where it is read at each level, 0 for none, over
                those where it is read at all: float32 [1 + levels, columns]; None: all are read whole
    row_costs -- of a format with planes, what a squared error of each output costs: float32 [rows]; None: all alike
    shrunk   -- whether it is a share of each input's own moment instead, which draws the products towards those of
                inputs that are independent: then few tokens, and single huge ones, tell little of other text
    """

    moments: Tensor
    products: Tensor | None = None
    damping: float = 0.01
    shrunk: bool = False
    levels: Tensor | None = None
    row_costs: Tensor | None = None

    def permuted(self, order: Tensor) -> "Inputs":
        """What is known of the same inputs in another order."""
        products = None if self.products is None else permuted(self.products, order)
        levels = None if self.levels is None else self.levels[:, order]
        return replace(self, moments=self.moments[order], products=products, levels=levels)

    def to(self, device: str) -> "Inputs":
        """What is known of the same inputs, the inverse of their products too, on another device."""
        products = None if self.products is None else self.products.to(device)
        levels = None if self.levels is None else self.levels.to(device)
        moved = replace(self, moments=self.moments.to(device), products=products, levels=levels)
        moved.__dict__["inverse_factor"] = self.inverse_factor.to(device)
        return moved

    @cached_property
    def by_size(self) -> tuple[Tensor, "Inputs"]:
        """The order of the inputs in which the largest come first, of equal ones the lower number, int64 [columns]; and
        what is known of them in that order, with the inverse of their products in place of these. Raises as
        `inverse_factor`."""
        order = self.moments.argsort(descending=True, stable=True)
        ordered = replace(self, products=None).permuted(order)
        if self.products is not None:
            factor = inverse_factor(self.products, order, self.damping, self.shrunk)
            ordered.__dict__["inverse_factor"] = factor
        return order, ordered

    @cached_property
    def inverse_factor(self) -> Tensor:
        """U, upper triangular, of the inverse U^T U of the damped products: float32 [columns, columns]. Raises
        `SingularError` where they have none (`sparsepack.inverse_factor`)."""
        assert self.products is not None
        order = torch.arange(len(self.products), device=self.products.device)
        return inverse_factor(self.products, order, self.damping, self.shrunk)

    def relative_error(self, weight: Tensor, changed: Tensor) -> float:
        """How far the outputs are from what they were: the root mean square of the difference over that of the outputs.

        By the second moments alone, where the products are not known, as if inputs were independent of each other.
        """
        return root_of_share(self.output_squares(weight - changed), self.output_squares(weight))

    def output_squares(self, weight: Tensor) -> float:
        """The mean over tokens of the squared length of a matrix's outputs; without products as `relative_error`."""
        of_inputs = weight * self.moments if self.products is None else weight @ self.products
        return max(float((of_inputs * weight).sum(dtype=torch.float64)), 0.0)

    @property
    def dead(self) -> Tensor:
        """Inputs that were zero for every token: bool [columns]."""
        return self.moments == 0


def root_of_share(difference: float, size: float) -> float:
    """The root of the share of `size` that `difference` is; 0 where there is nothing."""
    return math.sqrt(difference / size) if size > 0 else 0.0


class Sums:
    """Sums over tokens, from which `Inputs` are made."""

    def __init__(self, columns: int, products: bool, device: torch.device) -> None:
        self._tokens, self._device = 0.0, device
        self._squares = torch.zeros(columns, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._products = torch.zeros(columns, columns, device=device) if products else None

    def add(self, x: Tensor, weight: float = 1.0) -> None:
        """Count inputs [..., columns], each of them `weight` times."""
        x = x.flatten(0, -2).float()
        self._tokens += weight * len(x)
        self._squares += weight * x.square().sum(0, dtype=torch.float32).to(self._squares)
        if self._products is not None:
            for first in range(0, x.shape[1], _STRIP):
                strip = x[:, first : first + _STRIP]
                self._products[first : first + _STRIP, first:].addmm_(strip.t(), x[:, first:], alpha=weight)

    @property
    def tokens(self) -> float:
        """How many inputs were counted, by their weights."""
        return self._tokens

    @property
    def counted(self) -> dict[str, Tensor]:
        """What was counted, to be added elsewhere by `take`; the same tensors as long as nothing more is counted."""
        tokens = {"tokens": torch.tensor([self._tokens], dtype=torch.float64), "squares": self._squares}
        return tokens if self._products is None else {**tokens, "products": self._products}

    def take(self, counted: Mapping[str, Tensor]) -> None:
        """Add what others counted."""
        self._tokens += float(counted["tokens"])
        self._squares += counted["squares"].to(self._squares.device)
        if self._products is not None:
            self._products += counted["products"].to(self._products.device)

    def empty_like(self) -> "Sums":
        """Sums of the same kind in which nothing is counted."""
        return Sums(len(self._squares), self._products is not None, self._device)

    def clear(self) -> None:
        """Count from zero again."""
        self._tokens = 0.0
        self._squares.zero_()
        if self._products is not None:
            self._products.zero_()

    def inputs(self, damping: float, shrunk: bool = False) -> Inputs:
        """The means of what was counted, with `damping` for the inverse of the products. Sums of products become them:
        nothing can be counted any more."""
        products = None if self._products is None else symmetric_means(self._products, self._tokens)
        del self._products
        return Inputs((self._squares / self._tokens).float(), products, damping, shrunk)

    def unknown(self, damping: float) -> Inputs:
        """What stands for the means where nothing was counted: inputs of one size, independent of each other."""
        ones = torch.ones(len(self._squares), device=self._device)
        return Inputs(ones, None if self._products is None else torch.diag(ones), damping)


_SHARED = "shared"


def inputs_name(family: Family, site: str, projection: str, number: int = 0, layer: int = 0) -> str:
    """The name of what enters a matrix of a site: that of expert `number` where the projection is one of experts."""
    experts = family.experts_of(layer)
    if experts is None or site != MLP_MID:
        return site
    return f"{site}/{number if projection in experts.parameters else _SHARED}"


def empty_sums(checkpoint: Checkpoint, site: str, layer: int, products: bool, device: torch.device) -> dict[str, Sums]:
    """Sums of what enters the matrices of a site, by the names that `inputs_name` gives."""
    columns, experts = checkpoint.stacked_shape(site, layer)[1], expert_numbers(checkpoint.config, layer)
    if experts is None or site != MLP_MID:
        return {site: Sums(columns, products, device)}
    widths = {str(number): columns for number in range(experts.count)}
    widths |= {_SHARED: experts.shared * columns} if experts.shared else {}
    return {f"{site}/{name}": Sums(width, products, device) for name, width in widths.items()}


def entering(family: Family, site: str, x: Tensor, chosen: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """What enters each matrix of a site, by the names that `inputs_name` gives, from what a site's function is shown.

    chosen -- the experts that each token has been given: int64 [B, S, used]; None in a family without experts
    """
    if chosen is None or site != MLP_MID:
        yield site, x
        return
    used = chosen.shape[-1]
    for expert in sorted(set(chosen.flatten().tolist())):
        yield f"{site}/{expert}", x[:, :, :used][chosen == expert]
    if x.shape[2] > used:
        yield f"{site}/{_SHARED}", x[:, :, used:].flatten(2)


def inputs_of(sums: Mapping[str, Sums], damping: float, layer: int) -> dict[str, Inputs]:
    """The means of what was counted. Experts that no token reached are named on stderr: their inputs count as equally
    large, and as independent of each other."""
    unknown = [name for name, each in sums.items() if not each.tokens]
    if unknown:
        numbers = ", ".join(name.partition("/")[2] for name in unknown[:8])
        say(
            f"note: block {layer}: no token reached {len(unknown)} of its experts ({numbers}"
            f"{', ...' if len(unknown) > 8 else ''}); what stays of their down matrices is chosen by size"
        )
    return {name: each.inputs(damping) if each.tokens else each.unknown(damping) for name, each in sums.items()}


BLOCK = 128
"""The corrections of this many columns are put off for the columns behind them."""

Change = Callable[[int, Tensor], Tensor]
"""The function takes (number of a column in its group, the column float32 [rows]) and returns what becomes of it."""

Begin = Callable[[int, Tensor], Change]
"""The function takes (number of a group's first column, the group as it then is, float32 [rows, columns of the group])
and returns what changes its columns, one after the other."""


AtOnce = Callable[[Tensor, Tensor, int], Tensor | None]
"""The function takes (a block's columns float32 [columns, rows], which it changes in place, the factor U of all inputs,
number of the first of them) and returns the columns' errors, [columns, rows]; None where it cannot."""


def fed_back(
    weight: Tensor,
    inputs: Inputs,
    begin: Begin | None,
    group: int = 1,
    at_once: AtOnce | None = None,
    step: int = BLOCK,
    order: Tensor | None = None,
) -> Tensor:
    """float32 [rows, columns] -> its columns as `begin` would have them, in new memory.

    begin   -- None: `at_once` does all blocks
    group   -- columns that are begun together; the last group may be shorter
    at_once -- does to all columns of a block what `begin` says of each, faster
    step    -- columns of a block, rounded down to whole groups, one at least
    order   -- in which the columns are changed and returned, that of `inputs`; None: as they are

    Raises `SingularError` as `Inputs.inverse_factor`.
    """
    factor = inputs.inverse_factor
    columns = transposed(weight, torch.arange(weight.shape[1], device=weight.device) if order is None else order)
    step = max(step // group, 1) * group
    for first in range(0, len(columns), step):
        block = columns[first : first + step]
        errors = None if at_once is None else at_once(block, factor, first)
        if errors is None:
            assert begin is not None
            errors = _one_by_one(block, factor, first, begin, group)
        behind = first + len(block)
        columns[behind:].addmm_(factor[first:behind, behind:].t(), errors, alpha=-1)
    return columns.t()


def _one_by_one(block: Tensor, factor: Tensor, first: int, begin: Begin, group: int) -> Tensor:
    """Change a block's columns, [columns, rows], in place, one after the other; returns their errors."""
    pivots, errors = factor.diagonal(), torch.zeros_like(block)
    for start in range(0, len(block), group):
        here = block[start : start + group]
        of_here = slice(first + start, first + start + len(here))
        here.addmm_(factor[first : first + start, of_here].t(), errors[:start], alpha=-1)
        change = begin(first + start, here.t())
        for number, column in enumerate(here):
            at = first + start + number
            if number:
                column.addmv_(errors[start : start + number].t(), factor[first + start : at, at], alpha=-1)
            after = change(number, column)
            errors[start + number] = (column - after) / pivots[at]
            column.copy_(after)
    return errors

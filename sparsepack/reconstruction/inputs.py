"""What is known of the inputs of a matrix: their second moments, or their products with each other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sparsepack.errors import SingularError

_FLOOR = 0.001
"""Share of the mean moment that shrunk products get as well: some inputs are nearly never there."""
_SOLVED = 256
"""A triangular matrix of so many rows is inverted at once."""
_STRIP = 192
"""Products are symmetric: they are summed in strips of so many columns, from the diagonal on."""


@dataclass(frozen=True)
class Inputs:
    """Means over tokens, on the device where a matrix is changed.

    moments  -- of x_j ** 2: float32 [columns]
    products -- of x_i x_j: float32 [columns, columns], where a method needs them
    damping  -- share of the mean moment that is added to all of them, so that the products have an inverse
    shrunk   -- whether it is a share of each input's own moment instead, which draws the products towards those of
                inputs that are independent: then few tokens, and single huge ones, tell little of other text
    """

    moments: Tensor
    products: Tensor | None = None
    damping: float = 0.01
    shrunk: bool = False

    def permuted(self, order: Tensor) -> "Inputs":
        """What is known of the same inputs in another order."""
        products = None if self.products is None else self.products[order][:, order]
        return replace(self, moments=self.moments[order], products=products)

    def to(self, device: str) -> "Inputs":
        """What is known of the same inputs, the inverse of their products too, on another device."""
        products = None if self.products is None else self.products.to(device)
        moved = replace(self, moments=self.moments.to(device), products=products)
        moved.__dict__["inverse_factor"] = self.inverse_factor.to(device)
        return moved

    @cached_property
    def by_size(self) -> tuple[Tensor, "Inputs"]:
        """The order of the inputs in which the largest come first, of equal ones the lower number, int64 [columns]; and
        what is known of them in that order."""
        order = self.moments.argsort(descending=True, stable=True)
        return order, self.permuted(order)

    @cached_property
    def inverse_factor(self) -> Tensor:
        """U, upper triangular, of the inverse U^T U of the damped products: float32 [columns, columns].

        An input that never differs from zero counts as independent of all others. Raises `SingularError` where the
        products have no inverse even so.
        """
        assert self.products is not None
        hessian = self.products.clone()
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        mean = diagonal.mean()
        added = self.damping * diagonal + _FLOOR * mean if self.shrunk else self.damping * mean
        diagonal += torch.where(dead, 1.0, added)
        # H = R R^T with R upper triangular, which is Cholesky's factor from the last input to the first: U = R^-1.
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if failed:
            raise SingularError(f"the products of {len(diagonal)} inputs have no inverse with damping {self.damping:g}")
        return _inverted(lower).flip(0, 1).contiguous()

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


def _inverted(lower: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix, by halves: solving for the columns of the identity takes three times
    the arithmetic, since it does not know that they are mostly zeros."""
    size = len(lower)
    if size <= _SOLVED:
        solved: Tensor = torch.linalg.solve_triangular(lower, torch.eye(size, device=lower.device), upper=False)
        return solved
    half = size // 2
    first, last = _inverted(lower[:half, :half]), _inverted(lower[half:, half:])
    inverse = lower.new_zeros(size, size)
    inverse[:half, :half], inverse[half:, half:] = first, last
    torch.mm(last, lower[half:, :half] @ first, out=inverse[half:, :half]).neg_()
    return inverse


def _symmetric(products: Tensor) -> Tensor:
    """Products of which what lies above the diagonal is known, whole."""
    return products.triu() + products.triu(1).t()


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
        """The means of what was counted, with `damping` for the inverse of the products."""
        products = None if self._products is None else _symmetric(self._products) / self._tokens
        return Inputs((self._squares / self._tokens).float(), products, damping, shrunk)

    def unknown(self, damping: float) -> Inputs:
        """What stands for the means where nothing was counted: inputs of one size, independent of each other."""
        ones = torch.ones(len(self._squares), device=self._device)
        return Inputs(ones, None if self._products is None else torch.diag(ones), damping)

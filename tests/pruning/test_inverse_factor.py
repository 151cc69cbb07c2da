"""The factor of the inverse of inputs' products, beside float64 and beside plain torch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsepack import inverse_factor
from sparsepack.errors import SingularError

SIZES = [1, 17, 64, 300, 777]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def order_of(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plain torch in place of the kernels until it is undone."""
    with monkeypatch.context() as patch:
        patch.setattr(inverse_factor, "kernels", lambda: None)
        yield patch


@pytest.mark.parametrize("size", SIZES)
def test_copies_of_kernels_are_those_of_plain_torch(size: int, plain: pytest.MonkeyPatch) -> None:
    products, order, weight = normal(size, size), order_of(size), normal(33, size)
    of_some = order[: size // 2]
    expected = (
        inverse_factor.symmetric_means(products, 3.7),
        inverse_factor.permuted(products, order),
        inverse_factor.permuted(products, of_some),
        inverse_factor.transposed(weight, order),
    )
    plain.undo()
    found = (
        inverse_factor.permuted(products, order),
        inverse_factor.permuted(products, of_some),
        inverse_factor.transposed(weight, order),
        inverse_factor.symmetric_means(products, 3.7),  # in place of the products
    )
    assert torch.equal(found[3], expected[0])
    assert all(torch.equal(*each) for each in zip(found[:3], expected[1:], strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_factor_is_upper_triangular_and_of_the_inverse(size: int, plain: pytest.MonkeyPatch) -> None:
    x, order = normal(2 * size + 4, size), order_of(size)
    products = x.t() @ x / len(x)
    without = inverse_factor.inverse_factor(products, order, 0.05, shrunk=False)
    plain.undo()
    factor = inverse_factor.inverse_factor(products, order, 0.05, shrunk=False)
    assert torch.equal(factor, without)
    assert torch.equal(factor, factor.triu())
    damped = products.double() + 0.05 * products.diagonal().mean().double() * torch.eye(size)
    expected = damped[order][:, order].inverse()
    assert torch.allclose(factor.double().t() @ factor.double(), expected, rtol=1e-3, atol=1e-3)


def test_products_are_left_as_they_are_and_a_failure_names_their_number() -> None:
    products = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    with pytest.raises(SingularError, match=r"of 2 inputs have no inverse with damping 0\.01"):
        inverse_factor.inverse_factor(products, torch.arange(2), 0.01, shrunk=True)
    assert torch.equal(products, torch.tensor([[1.0, 5.0], [5.0, 1.0]]))


@pytest.mark.parametrize("dead", [0, 3])
def test_an_input_that_is_never_there_is_independent(dead: int) -> None:
    x = normal(40, 5)
    x[:, dead] = 0
    factor = inverse_factor.inverse_factor(x.t() @ x, torch.arange(5), 0.5, shrunk=True)
    alone = torch.zeros(5)
    alone[dead] = 1
    assert torch.equal(factor[dead], alone)
    assert torch.equal(factor[:, dead], alone)

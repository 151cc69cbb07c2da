"""How the weights that stay are chosen and corrected, against plain references."""

import pytest
import torch
from pruning_cases import PATTERNS, known, tokens, weights
from torch import Tensor

from sparsepack import reconstruction as feedback
from sparsepack.calibrate import sparsegpt
from sparsepack.calibrate.prune import METHODS as NAMES
from sparsepack.calibrate.sparsegpt import METHODS
from sparsepack.errors import SingularError
from sparsepack.models.pattern import Pattern, check_pattern, grouped
from sparsepack.reconstruction import Inputs, Sums


def plain_sparsegpt(weight: Tensor, products: Tensor, damping: float, pattern: Pattern) -> Tensor:
    """One column at a time, the inverse of what is left made anew by elimination, in float64."""
    weight, hessian = weight.double().clone(), products.double().clone()
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    inverse = hessian.inverse()
    # What a group's columns are worth: the inverse's diagonal as it will be when each one's turn comes.
    pivots, left = [], inverse.clone()
    for j in range(len(left)):
        pivots.append(float(left[j, j]))
        left = left - torch.outer(left[:, j], left[j]) / left[j, j]
    for j in range(weight.shape[1]):
        if j % pattern.of == 0:
            group = slice(j, min(j + pattern.of, weight.shape[1]))
            scores = weight[:, group].square() / torch.tensor(pivots[group], dtype=torch.float64)
            drop = max(scores.shape[1] - pattern.keep, 0)
            goes = torch.zeros_like(scores, dtype=torch.bool)
            goes.scatter_(1, scores.argsort(dim=1)[:, :drop], True)
        error = torch.where(goes[:, j % pattern.of], weight[:, j], 0) / inverse[j, j]
        weight[:, j:] -= torch.outer(error, inverse[j, j:])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        weight[:, j] = torch.where(goes[:, j % pattern.of], 0.0, weight[:, j])
    return weight


@pytest.mark.parametrize("columns", [5, 64, 150])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sparsegpt_is_the_plain_algorithm(pattern: Pattern, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "BLOCK", 32)
    inputs, weight = known(tokens(1000, columns)), weights(12, columns)
    assert inputs.products is not None
    expected = plain_sparsegpt(weight, inputs.products, inputs.damping, pattern)
    found = sparsegpt.prune(weight, inputs, pattern)
    assert ((found != 0) == (expected != 0)).float().mean() > 0.99  # a tie may fall otherwise in float32
    same = ((found != 0) == (expected != 0)).all(1)
    assert (found[same] - expected[same]).abs().max() < 2e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("columns", [300, 301, 7])
def test_groups_lie_on_one_grid_over_the_whole_matrix(name: str, pattern: Pattern, columns: int) -> None:
    inputs, weight = known(tokens(900, columns)), weights(20, columns)
    pruned = METHODS[name].prune(weight, inputs, pattern)
    check_pattern(pruned, pattern)
    whole = grouped((pruned != 0).int(), pattern).sum(-1)
    sizes = grouped(torch.ones(20, columns).int(), pattern).sum(-1).clamp_max(pattern.keep)
    assert torch.equal(whole, sizes)


def test_methods_are_in_the_expected_order() -> None:
    x, weight, pattern = tokens(4000, 256), weights(200, 256), Pattern(6, 8)
    inputs = known(x)
    errors = {}
    for name in NAMES:
        pruned = METHODS[name].prune(weight, inputs, pattern)
        errors[name] = float((x @ (weight - pruned).t()).norm() / (x @ weight.t()).norm())
        assert inputs.relative_error(weight, pruned) == pytest.approx(errors[name], rel=1e-3)
    assert errors["sparsegpt"] < 0.8 * errors["wanda"] < 0.8 * errors["magnitude"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_weight_is_worth_is_what_leaving_it_out_costs(name: str) -> None:
    inputs, weight = known(tokens(500, 24)), weights(3, 24)
    values = METHODS[name].values(weight, inputs)
    assert (values >= 0).all()
    if name == "sparsegpt":
        assert inputs.products is not None
        damped = inputs.products.double() + inputs.damping * inputs.products.diagonal().mean().double() * torch.eye(24)
        assert torch.allclose(values.double(), weight.double().square() / damped.inverse().diagonal(), rtol=1e-3)
    else:
        without = weight.clone()
        without[1, 5] = 0
        size = inputs.moments if name == "wanda" else torch.ones(24)
        assert values[1, 5] == pytest.approx(float(((weight - without).square() * size).sum()))


def test_an_input_that_is_always_zero_takes_no_weight_that_matters() -> None:
    x, weight = tokens(500, 16), weights(4, 16)
    x[:, [2, 3]] = 0
    pruned = sparsegpt.prune(weight, known(x), Pattern(6, 8))
    assert not pruned[:, [2, 3]].any()
    assert torch.equal(pruned[:, :8] != 0, (torch.arange(8) != 2) & (torch.arange(8) != 3) & torch.ones(4, 8).bool())


def test_inputs_add_up_over_batches() -> None:
    x = tokens(300, 12)
    one, many = Sums(12, True, torch.device("cpu")), Sums(12, True, torch.device("cpu"))
    one.add(x)
    for part in x.split(7):
        many.add(part)
    whole, parts = one.inputs(0.01), many.inputs(0.01)
    assert whole.products is not None
    assert parts.products is not None
    assert torch.allclose(whole.moments, x.square().mean(0), rtol=1e-5)
    assert torch.allclose(whole.products, x.t() @ x / 300, rtol=1e-4, atol=1e-5)
    assert torch.allclose(parts.products, whole.products, rtol=1e-4, atol=1e-5)


def test_products_without_an_inverse_are_one_line() -> None:
    products = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    with pytest.raises(SingularError, match=r"no inverse with damping 0\.01"):
        sparsegpt.prune(weights(2, 2), Inputs(products.diagonal(), products), Pattern(1, 2))

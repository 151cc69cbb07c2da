"""New weights of one matrix, against plain least squares in float64."""

import pytest
import torch
from torch import Tensor

from sparsepack.calibrate.refit_inputs import SiteInputs, SiteSums, refitted
from sparsepack.models.sites import SiteRule, sparsify

RULES = {
    "a threshold": SiteRule(threshold=0.7, sparsity=0.5),
    "a threshold each": SiteRule(threshold=torch.linspace(0.1, 1.5, 12)),
    "an offset": SiteRule(threshold=0.7, offset=torch.linspace(-0.4, 0.4, 12), sparsity=0.5),
    "nothing active": SiteRule(threshold=1e9, sparsity=0.9),
    "nothing active but an offset": SiteRule(threshold=1e9, offset=torch.full((12,), 0.1), sparsity=0.9),
}


def tokens(windows: int, length: int, columns: int = 12, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(windows, length, columns, generator=generator)
    return mixed @ torch.randn(columns, columns, generator=generator) / columns**0.5


def weights(rows: int = 7, columns: int = 12) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def known(weight: Tensor, x: Tensor, rule: SiteRule | None, dense: float | None, damping: float = 0.01) -> SiteInputs:
    sums = SiteSums(weight, rule, dense)
    for part in x.split(3):
        sums.add(part)
    return sums.inputs(damping)


def plain(weight: Tensor, x: Tensor, rule: SiteRule, dense: float, damping: float) -> Tensor:
    """Least squares over all tokens, each weighted by its half's share, and over the distance from the old weights."""
    half = x.shape[1] // 2
    prompt, late = x[:, :half].flatten(0, 1).double(), x[:, half:].flatten(0, 1)
    sparse, late = sparsify(late, rule).double(), late.double()
    roots = (dense / len(prompt)) ** 0.5, ((1 - dense) / len(late)) ** 0.5
    seen = torch.cat([prompt * roots[0], sparse * roots[1]])
    wanted = torch.cat([prompt * roots[0], late * roots[1]]) @ weight.double().t()
    moments = seen.square().sum(0)
    strength = torch.where(moments == 0, 1.0, damping * moments.mean()).sqrt().diag()
    seen, wanted = torch.cat([seen, strength]), torch.cat([wanted, strength @ weight.double().t()])
    return torch.linalg.lstsq(seen, wanted).solution.t()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dense", [0.0, 0.3])
@pytest.mark.parametrize("length", [20, 21])
def test_new_weights_are_those_of_least_squares(name: str, dense: float, length: int) -> None:
    weight, x, rule = weights(), tokens(10, length), RULES[name]
    found = refitted(weight, known(weight, x, rule, dense))
    assert torch.allclose(found.double(), plain(weight, x, rule, dense, 0.01), rtol=1e-3, atol=1e-3)


def test_without_anything_skipped_weights_stay_as_they_are() -> None:
    weight, x = weights(), tokens(10, 20)
    for rule in (None, SiteRule()):
        assert torch.equal(refitted(weight, known(weight, x, rule, 0.2)), weight)


@pytest.mark.parametrize("name", RULES)
def test_the_error_is_that_of_the_outputs(name: str) -> None:
    weight, x, rule = weights(), tokens(10, 20), RULES[name]
    found = known(weight, x, rule, 0.0)
    late = x[:, 10:].flatten(0, 1)
    for changed in (weight, refitted(weight, found)):
        difference = sparsify(late, rule) @ changed.t() - late @ weight.t()
        expected = float(difference.norm() / (late @ weight.t()).norm())
        assert found.relative_error(weight, changed) == pytest.approx(expected, rel=1e-3)


def test_new_weights_have_less_error_on_other_tokens_too() -> None:
    weight, x, rule = weights(), tokens(60, 20), RULES["a threshold"]
    found = refitted(weight, known(weight, x[:40], rule, 0.0))
    unseen = known(weight, x[40:], rule, 0.0)
    assert unseen.relative_error(weight, found) < 0.95 * unseen.relative_error(weight, weight)


def test_halves_count_by_their_shares() -> None:
    weight, x, rule = weights(), tokens(10, 20), RULES["a threshold"]
    late, both = known(weight, x, rule, 0.0), known(weight, x, rule, 0.25)
    assert late.inputs.products is not None
    assert both.inputs.products is not None
    prompt = x[:, :10].flatten(0, 1)
    mixed = 0.25 * prompt.t() @ prompt / len(prompt) + 0.75 * late.inputs.products
    assert torch.allclose(both.inputs.products, mixed, rtol=1e-4, atol=1e-5)
    assert both.lost is not None
    assert late.lost is not None
    assert torch.allclose(both.lost, 0.75 * late.lost, rtol=1e-4, atol=1e-5)

"""Levels of planes for experts: what they cost those that few tokens have or none, and what each reads."""

import torch
from models_for_tests import make_model
from torch import Tensor

from sparsepack.calibrate.fisher import Seen
from sparsepack.calibrate.planes import level_costs, site_costs
from sparsepack.calibrate.refit_inputs import ExpertSums
from sparsepack.formats.plan import EncodedSite
from sparsepack.formats.zigzag.plan import encoded_site
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sites import SiteRule, levels_read
from sparsepack.reconstruction import Inputs


def test_an_expert_that_no_token_reached_has_the_mean_costs_of_the_others(tmp_path, text, capsys) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "qwen2_moe"))
    generator, key = torch.Generator().manual_seed(0), (0, "mlp_mid")
    rows, columns = checkpoint.config.hidden_size, checkpoint.stacked_shape(key[1])[1]
    chosen = torch.tensor([0, 2, 5, 8, 9]).expand(1, 30, -1).clone()  # the last two are the shared one's parts
    chosen[:, ::3, 1] = 3
    x, at_input = (torch.randn(*chosen.shape, columns, generator=generator) for _ in range(2))
    of_rows = torch.zeros(10, rows)
    reached = [0, 2, 3, 5, 8, 9]
    of_rows[reached] = torch.rand(6, rows, generator=generator)
    costs = site_costs(checkpoint, key, "Q6_P", Seen(x, at_input, of_rows, chosen))
    assert costs.shape == (6, 10, columns)
    shares = torch.tensor([1, 2 / 3, 1 / 3, 1, 1, 1])
    exact = []
    for number, share in zip(reached, shares.tolist(), strict=True):
        weight = [*checkpoint.each_expert(*key)][number]
        own = at_input[chosen == number]
        exact.append(level_costs(weight, "Q6_P", own, of_rows[number] / share, row_scales=False))
    mean = (torch.stack(exact, 1).mean(2) * shares).sum(1) / shares.sum()
    assert torch.allclose(costs[:, 1], mean[:, None].expand(-1, columns), rtol=1e-4)
    tokens = 30 * shares[:, None]
    expected = (torch.stack(exact, 1) * tokens + 8 * mean[:, None, None]) / (tokens + 8)
    assert torch.allclose(costs[:, reached], expected, rtol=1e-4)
    assert "no token reached 4 of its experts (1, 4, 6, 7)" in capsys.readouterr().err


def test_sums_of_experts_know_what_each_reads_at_each_level(tmp_path) -> None:
    checkpoint = open_checkpoint(
        make_model(tmp_path / "m", "qwen2_moe")
    )  # 8 experts of 256, and two parts of a shared one
    generator, site = torch.Generator().manual_seed(0), "mlp_mid"
    chosen = torch.randint(7, (2, 30, 2), generator=generator)
    chosen[..., 1] = (chosen[..., 0] + 1) % 7  # none has the last expert
    x = torch.randn(2, 30, 4, 256, generator=generator)
    rule = SiteRule(torch.rand(10, 256, generator=generator), sparsity=0.5, steps=torch.tensor([1.0, 1.2, 1.5, 2, 3]))
    sums = ExpertSums(checkpoint, 0, site, rule, [chosen], "cpu")
    for part in (slice(0, 1), slice(1, 2)):
        sums._routed[:] = [chosen[part]]
        sums.add(x[part])
    known: list[Inputs | None] = []

    def encode(weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        known.append(inputs)
        return encoded_site("Q6_P", 0, site, weight, None, row_scales=False)

    sums.fitted(encode, lambda columns, tokens: 1.0, torch.float32)
    of_expert = known[::2]  # each is rounded, too
    assert of_expert[7] is None
    for number, inputs in enumerate(of_expert):
        if inputs is None:
            continue
        own = x[:, :, :2][chosen == number] if number < 8 else x[:, :, number - 6].flatten(0, 1)
        levels = levels_read(own, rule.limits[number])
        read = torch.where(levels > 0, own, 0)
        assert inputs.products is not None
        assert torch.allclose(inputs.products, read.T @ read / len(own), atol=1e-5), number
        of_level = torch.stack([torch.where(levels == level, own.square(), 0).sum(0) for level in range(6)])
        assert inputs.levels is not None
        assert torch.allclose(inputs.levels, of_level / of_level[1:].sum(0).clamp_min(1e-30), rtol=1e-4), number

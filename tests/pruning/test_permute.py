"""Orders of inputs: the model computes what it did, and a pattern loses less."""

from pathlib import Path

import pytest
import torch
from models_for_tests import ONLY_ATTENTION, make_model
from pairwise import each_value

from sparsepack.calibrate import permute
from sparsepack.calibrate.permute import better_order, lost, permuted_block
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.pattern import Pattern


def values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Some columns matter far more than others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).square() * torch.rand(columns, generator=generator) ** 4


@pytest.mark.parametrize("family", ONLY_ATTENTION)
def test_a_block_in_another_order_computes_the_same(family: str, tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    checkpoint = open_checkpoint(make_model(tmp_path / "m", family, **changes))
    stream = BlockStream(checkpoint)
    stream.load(1)
    x = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(0))
    expected = stream(x)
    before = {name: value.clone() for name, value in stream.block.state_dict().items()}
    config, generator = checkpoint.config, torch.Generator().manual_seed(1)
    kv_heads = config.num_key_value_heads
    width = checkpoint.stacked_shape("attn_out")[1] // config.num_attention_heads
    neurons = torch.randperm(config.intermediate_size, generator=generator)
    channels = torch.stack([torch.randperm(width, generator=generator) for _ in range(kv_heads)])
    stream.replace(permuted_block(before, checkpoint.family, neurons, channels, config.num_attention_heads))
    moved = stream.block.state_dict()
    of = checkpoint.family.projections
    for name in (*of["mlp_mid"], *of["mlp_in"], of["attn_in"][-1], *of["attn_out"]):
        assert not torch.equal(moved[f"{name}.weight"], before[f"{name}.weight"])
    assert torch.allclose(stream(x), expected, rtol=1e-4, atol=1e-5)


@each_value(
    {"pattern": [Pattern(2, 4), Pattern(4, 6), Pattern(4, 8), Pattern(6, 8), Pattern(14, 16)], "columns": [64, 203]}
)
def test_a_better_order_loses_less(pattern: Pattern, columns: int) -> None:
    scores = values(100, columns)
    order = better_order(scores, pattern)
    assert order is not None
    assert sorted(order.tolist()) == list(range(columns))
    assert lost(scores[:, order], pattern) < 0.95 * lost(scores, pattern)
    assert torch.equal(order, better_order(scores, pattern))


def test_weak_columns_that_stand_together_are_spread() -> None:
    scores = torch.ones(10, 64)
    scores[:, :16] = 0  # a quarter of all: two for each group of eight
    order = better_order(scores, Pattern(6, 8))
    assert order is not None
    assert lost(scores, Pattern(6, 8)) > 0
    assert lost(scores[:, order], Pattern(6, 8)) == 0


def test_where_no_order_is_better_none_is_given() -> None:
    assert better_order(torch.ones(10, 64), Pattern(6, 8)) is None
    assert better_order(values(10, 8), Pattern(6, 8)) is None


@pytest.mark.parametrize("pattern", [Pattern(6, 8), Pattern(2, 4), Pattern(4, 8)], ids=str)
def test_what_a_swap_would_lose_is_what_it_loses(pattern: Pattern) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randint(0, 5, (2, 3, pattern.of, 20), generator=generator).float()  # with many ties
    found = permute._Group(one, pattern).with_one_of(permute._Group(other, pattern))
    for i in range(pattern.of):
        for j in range(pattern.of):
            swapped = one.clone()
            swapped[:, i] = other[:, j]
            expected = [lost(group.t().contiguous(), pattern) for group in swapped]
            assert found[:, i, j].tolist() == expected


@pytest.mark.parametrize("pattern", [Pattern(6, 8), Pattern(2, 4)], ids=str)
def test_the_swap_that_helps_most_is_made(pattern: Pattern) -> None:
    size = 2 * pattern.of
    by_column = torch.rand(size, 20, generator=torch.Generator().manual_seed(3))
    by_column[: pattern.of] *= 4  # one group has the large columns
    groups = torch.arange(size).view(2, pattern.of)
    swaps = []
    for i in range(pattern.of):
        for j in range(pattern.of):
            swapped = groups.clone()
            swapped[0, i], swapped[1, j] = groups[1, j], groups[0, i]
            swaps.append((sum(lost(by_column[group].t().contiguous(), pattern) for group in swapped), swapped))
    assert permute._swap(groups, by_column, torch.tensor([[0], [1]]), pattern, size)
    assert torch.equal(groups, min(swaps, key=lambda swap: swap[0])[1])


def test_a_shorter_last_group_loses_what_is_behind_it() -> None:
    """Ten columns, keep 6 of 8: the last two of them have room for both."""
    scores = torch.arange(1.0, 11)[None].repeat(4, 1)
    order = better_order(scores, Pattern(6, 8))
    assert lost(scores, Pattern(6, 8)) == 4 * 3
    assert order is None or lost(scores[:, order], Pattern(6, 8)) < 4 * 3

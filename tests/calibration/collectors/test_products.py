"""Sums over pairs of |q_c k_c|, against all pairs one by one."""

import pytest
import torch
from attention_pairs import all_pairs

from sparsepack.calibrate.collectors import of_groups, product_sums


@pytest.mark.parametrize("window", [0, 1, 3, 6, 7, 8, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_the_sums_are_those_over_the_pairs_that_attention_compares(heads, kv_heads, window):
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(2, heads, 7, 5, generator=generator)
    key = torch.randn(2, kv_heads, 7, 5, generator=generator)
    found = product_sums(query, key, window)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, all_pairs(query, key, window), rtol=1e-6, atol=0)


def test_what_is_computed_in_16_bits_is_summed_in_64():
    query, key = torch.ones(1, 2, 600, 4, dtype=torch.bfloat16), torch.ones(1, 1, 600, 4, dtype=torch.bfloat16)
    found = product_sums(query, key, 0)
    assert torch.equal(found, torch.full((1, 4), 600 * 601 / 2, dtype=torch.float64))


def test_neighbouring_query_heads_share_a_kv_head():
    heads = torch.tensor([[0.0, 1], [2, 3], [10, 20], [30, 40]])
    assert torch.equal(of_groups(heads, 2), torch.tensor([[1.0, 2], [20, 30]]))
    assert torch.equal(of_groups(heads, 4), heads)

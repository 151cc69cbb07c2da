"""The oracle of Double Sparsity, beside loops over positions, heads and tokens."""

import math
from fractions import Fraction

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.formats.blocks.labels import encode_labels, label_numbers
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.reference.double_sparsity import (
    Labels,
    attend_selected,
    attend_sparse,
    heavy,
    label_queries,
    label_scores,
    select_tokens,
)

POLICIES = [
    TokenPolicy(Fraction(1, 4), sinks=1, recent=2, min_context=0),
    TokenPolicy(Fraction(1, 7), sinks=0, recent=1, min_context=0),
    TokenPolicy(Fraction(1, 3), sinks=3, recent=4, min_context=20),
    TokenPolicy(Fraction(1), sinks=0, recent=1, min_context=0),
]


def selected_by_a_loop(scores: Tensor, position: int, policy: TokenPolicy, window: int) -> set[int]:
    oldest = max(0, position + 1 - window) if window else 0
    seen = range(oldest, position + 1)

    def order(token: int) -> tuple[bool, float, int]:
        always = token < policy.sinks or token > position - policy.recent
        return not always, -float(scores[token]), token

    return set(sorted(seen, key=order)[: policy.budget(len(seen))])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 9, 30])
def test_selected_are_the_best_the_sinks_and_the_recent_ones(policy: TokenPolicy, window: int) -> None:
    scores = normal(2, 12, 45, seed=1).mul(3).round().bfloat16()  # many of them equal
    selected = select_tokens(scores, 33, policy, window)
    for head in range(2):
        for row in range(12):
            found = set(selected[head, row].nonzero()[:, 0].tolist())
            assert found == selected_by_a_loop(scores[head, row], 33 + row, policy, window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_scores_are_products_of_the_group_s_mean_query(heads: int, kv_heads: int) -> None:
    queries, keys = normal(heads, 3, 16, seed=2), normal(kv_heads, 40, 16, seed=3)
    channels = torch.stack(
        [torch.randperm(16, generator=torch.Generator().manual_seed(n))[:6] for n in range(kv_heads)]
    )
    codes, scales = encode_labels(heavy(keys, channels))
    scores = label_scores(label_queries(queries, channels), codes, scales)
    numbers, ratio = label_numbers(codes), heads // kv_heads
    for head in range(kv_heads):
        for row in range(3):
            mean = sum(queries[head * ratio + n, row] for n in range(ratio))[channels[head]]
            eight_bits = (mean * (127 / mean.abs().max())).round()
            for token in range(40):
                exact = float(eight_bits @ numbers[head, token, :6].float()) * float(scales[head, token])
                assert float(scores[head, row, token]) == pytest.approx(exact, rel=2**-8, abs=1e-3)


@pytest.mark.parametrize("window", [0, 20])
def test_attention_is_a_softmax_over_what_is_selected(window: int) -> None:
    heads, kv_heads, width, first = 6, 2, 16, 30
    queries, keys, values = (normal(n, s, width, seed=s + n) for n, s in ((heads, 7), (kv_heads, 37), (kv_heads, 37)))
    channels = torch.arange(8).expand(kv_heads, -1)
    labels, policy = encode_labels(heavy(keys, channels)), POLICIES[0]
    found = attend_sparse(queries, keys, values, Labels(*labels, channels), policy, first, window)
    selected = select_tokens(label_scores(label_queries(queries, channels), *labels), first, policy, window)
    for row in range(7):
        for head in range(heads):
            group = head * kv_heads // heads
            tokens = selected[group, row].nonzero()[:, 0].tolist()
            assert tokens[-1] == first + row
            weights = [math.exp(float(queries[head, row] @ keys[group, t]) / width**0.5) for t in tokens]
            expected = sum(w * values[group, t] for w, t in zip(weights, tokens, strict=True)) / sum(weights)
            torch.testing.assert_close(found[row].view(heads, width)[head], expected, rtol=1e-4, atol=1e-5)


def test_every_token_selected_is_dense_attention() -> None:
    queries, keys, values = normal(4, 5, 8, seed=5), normal(2, 20, 8, seed=6), normal(2, 20, 8, seed=7)
    everything = torch.ones(2, 5, 20, dtype=torch.bool)
    found = attend_selected(queries, keys, values, everything).view(5, 4, 8).transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], enable_gqa=True
    )
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)

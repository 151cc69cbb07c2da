"""How many tokens a policy reads."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy, described, in_words


@pytest.mark.parametrize(
    ("tokens", "seen", "budget"),
    [
        (Fraction(1, 16), 1, 1),
        (Fraction(1, 16), 1023, 1023),  # fewer than min_context: all
        (Fraction(1, 16), 1024, 68),  # sinks and recent ones are more than the share
        (Fraction(1, 16), 1089, 69),  # the share, rounded up
        (Fraction(1, 16), 16384, 1024),
        (Fraction(1, 16), 16385, 1025),
        (Fraction(1), 5000, 5000),
        (Fraction(2, 3), 3001, 2001),
    ],
)
def test_budgets(tokens: Fraction, seen: int, budget: int) -> None:
    assert TokenPolicy(tokens, sinks=4, recent=64, min_context=1024).budget(seen) == budget


def test_no_more_tokens_are_read_than_are_seen() -> None:
    policy = TokenPolicy(Fraction(1, 8), sinks=4, recent=64, min_context=0)
    assert [policy.budget(seen) for seen in (1, 30, 68, 69, 600)] == [1, 30, 68, 68, 75]


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"recent": 0}, {"min_context": -1}, {"tokens": Fraction(0)}])
def test_a_policy_that_reads_no_recent_token_or_no_share_is_refused(wrong: dict[str, Any]) -> None:
    least: dict[str, Any] = {"tokens": Fraction(1, 4), "sinks": 0, "recent": 1, "min_context": 0}
    TokenPolicy(**least)
    with pytest.raises(UserError, match="expected"):
        TokenPolicy(**{**least, **wrong})


def test_a_description_has_the_policy_the_channels_and_the_dense_layers() -> None:
    policy = TokenPolicy(Fraction(1, 4), sinks=2, recent=3, min_context=1008)
    numbers = described(SparseAttention(policy, (None, torch.tensor([[0, 3], [1, 2]]))))
    assert numbers == {
        "tokens": "1/4",
        "sinks": 2,
        "recent": 3,
        "min_context": 1008,
        "channels": 2,
        "layers": 2,
        "dense_layers": [0],
    }
    assert in_words(numbers) == (
        "from 1,008 tokens on a decoded one reads 1/4 of them: the first 2, the last 3, and those that 2 channels rank "
        "best; layer 0 of 2 reads all"
    )
    assert described(SparseAttention(TokenPolicy(Fraction(1)), (None,)))["tokens"] == "1/1"
